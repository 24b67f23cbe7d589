"""Slurm's job states, and the stage of a job in each. Pure.

Source: JOB STATE CODES in squeue(1) and sacct(1), of Slurm 20.11 to 25.05.
"""

from __future__ import annotations

from typing import Literal

Stage = Literal["waits", "runs", "ended", "unknown"]

WAITING = frozenset({
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "POWER_UP_NODE",
})  # fmt: skip
RUNNING = frozenset({
    "RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED", "UPDATE_DB", "EXPEDITING",
})  # fmt: skip
ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "GONE", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
})  # fmt: skip
"""GONE is our own state: neither squeue nor sacct knows the job any more (orchestrator/sweeps/slurm_jobs.py)."""


def stage_of(state: str) -> Stage:
    """Return the stage of a job in ``state``. A state of a later Slurm is "unknown" and never counts as an end."""
    if state in ENDED:
        return "ended"
    return "waits" if state in WAITING else "runs" if state in RUNNING else "unknown"
