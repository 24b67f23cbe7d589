"""Slurm's job states, and what each means for a run that was in such a job. Pure.

Source: JOB STATE CODES in squeue(1) and sacct(1), of Slurm 20.11 to 25.05.
"""

from __future__ import annotations

from typing import Literal

from launch.contract.outcomes import OutcomeName

Life = Literal["waits", "runs", "ended", "unknown"]

WAITING = frozenset({
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "POWER_UP_NODE",
})  # fmt: skip
RUNNING = frozenset({
    "RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "SUSPENDED", "STOPPED", "UPDATE_DB", "EXPEDITING",
})  # fmt: skip
OUTCOME_OF_STATE: dict[str, OutcomeName] = {
    "BOOT_FAIL": "NODE_FAIL",
    "CANCELLED": "CANCELLED",
    "COMPLETED": "FAILED",
    "DEADLINE": "TIMEOUT",
    "FAILED": "FAILED",
    "GONE": "FAILED",
    "LAUNCH_FAILED": "NODE_FAIL",
    "NODE_FAIL": "NODE_FAIL",
    "OUT_OF_MEMORY": "HOST_OOM",
    "PREEMPTED": "PREEMPTED",
    "RECONFIG_FAIL": "NODE_FAIL",
    "REVOKED": "CANCELLED",
    "TIMEOUT": "TIMEOUT",
}
"""Of an attempt that had no outcome when its job ended so. A job that COMPLETED or FAILED under a run had its supervisor
die. GONE is no word of Slurm's: neither squeue nor sacct knows the job any more (orchestrator/sweeps/slurm_jobs.py)."""


def stage_of(state: str) -> Life:
    """What a job in ``state`` does. A state that no version up to now has is "unknown", and never taken for an end."""
    if state in OUTCOME_OF_STATE:
        return "ended"
    return "waits" if state in WAITING else "runs" if state in RUNNING else "unknown"
