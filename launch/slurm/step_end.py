"""Ask Slurm's accounting whether a step was cancelled, or killed for its memory."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from launch.slurm.command import try_run

PATIENCE_SECONDS = 5.0
"""How long to wait until accounting knows a step's end. It is usually late by about a second."""
_FIELDS = "JobName,State,MaxRSS,NNodes,TRESUsageInTot%200,AllocTRES%200"
_RUNS = ("RUNNING", "PENDING", "")
_CANCELLED = re.compile(r"\*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ \*\*\*")
_TASK_ENDED = re.compile(r"^srun: error: \S+: tasks? ", re.MULTILINE)


@dataclass(frozen=True)
class StepEnd:
    """How a step ended, if Slurm ended it."""

    cancelled: bool = False
    """Whether somebody cancelled it (scancel JOB.STEP)."""
    over_memory: str = ""
    """The memory that it used and had, in words, if Slurm killed it for memory."""


def step_end(job: str, step_name: str) -> StepEnd:
    """Ask accounting how the step ended. Return nothing if Slurm did not end it, or without accounting."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        listed = try_run("sacct", "--noheader", "--parsable2", "--units=K", f"--jobs={job}", f"--format={_FIELDS}")
        rows = [row.split("|") for row in (listed or "").splitlines()]
        ended = [row for row in rows if row[0] == step_name and row[1] not in _RUNS]
        if ended or time.monotonic() > deadline:
            return parse_step_end(*ended[-1][1:]) if ended else StepEnd()
        time.sleep(0.5)


def parse_step_end(state: str, max_rss: str, nodes: str, used: str, granted: str) -> StepEnd:
    """Return :func:`step_end` from a row of sacct: sizes in kB ("204800K"), TRES as "cpu=4,mem=409600K"."""
    over_memory = _memory_kill(state, max_rss, nodes, used, granted)
    # A step whose tasks were killed by a signal is CANCELLED too, but by nobody.
    return StepEnd(state.startswith("CANCELLED by ") and not over_memory, over_memory)


def cancelled_first(log: str) -> bool:
    """Return whether the step was cancelled before any of its tasks ended, by srun's ``log``.

    Accounting keeps the largest exit code of all nodes. It says FAILED of a cancelled step if a rank on another node lost the
    connection to a killed one, and failed before Slurm ended it too.
    """
    cancelled, ended = _CANCELLED.search(log), _TASK_ENDED.search(log)
    return cancelled is not None and (ended is None or cancelled.start() < ended.start())


def _memory_kill(state: str, max_rss: str, nodes: str, used: str, granted: str) -> str:
    """Describe the memory that the step used and had, if Slurm killed it for memory; "" if not.

    OUT_OF_MEMORY appears only if a control group limits memory. If Slurm itself polls (OverMemoryKill), the step is CANCELLED
    and used more memory than it had on a node, by one task alone or by the mean over its nodes.
    """
    if state == "OUT_OF_MEMORY":
        return "a process of the run took more host memory than the job has on its node"
    had = _kilobytes(_memory_of(granted)) / max(1, int(nodes or 1))
    took = max(_kilobytes(max_rss), _kilobytes(_memory_of(used)) / max(1, int(nodes or 1)))
    return f"it took {took / 1024:.0f} MB of host memory on a node, of {had / 1024:.0f} MB" if took > had > 0 else ""


def _memory_of(resources: str) -> str:
    named = dict(pair.split("=", 1) for pair in resources.split(",") if "=" in pair)
    return named.get("mem", "")


def _kilobytes(size: str) -> float:
    return float(size.removesuffix("K") or 0)
