"""Ask Slurm's accounting whether a step was killed for its memory."""

from __future__ import annotations

import time

from launch.slurm.command import try_run

PATIENCE_SECONDS = 5.0
"""How long to wait until accounting knows a step's end. It is usually late by about a second."""
_FIELDS = "JobName,State,MaxRSS,NNodes,TRESUsageInTot%200,AllocTRES%200"
_RUNS = ("RUNNING", "PENDING", "")


def memory_kill_reason(job: str, step_name: str) -> str:
    """Describe the memory that the step used and had, if Slurm killed it for memory; "" if not, or without accounting."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        listed = try_run("sacct", "--noheader", "--parsable2", "--units=K", f"--jobs={job}", f"--format={_FIELDS}")
        rows = [row.split("|") for row in (listed or "").splitlines()]
        ended = [row for row in rows if row[0] == step_name and row[1] not in _RUNS]
        if ended or time.monotonic() > deadline:
            return parse_memory_kill(*ended[-1][1:]) if ended else ""
        time.sleep(0.5)


def parse_memory_kill(state: str, max_rss: str, nodes: str, used: str, granted: str) -> str:
    """Return :func:`memory_kill_reason` from a row of sacct: sizes in kB ("204800K"), TRES as "cpu=4,mem=409600K".

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
