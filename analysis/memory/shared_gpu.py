"""Find runs whose GPU other processes used, by the memory outside the allocator at the end of phase init.

A process holds little there before it has a model: a context and communicators, and all runs of a workload hold about the same.
The driver counts other processes too. Their memory would count as the run's, and their work would slow its steps. A process
that comes later is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from analysis.records.load import Records
from analysis.records.run import Attempt, Run
from launch.common.grouped import grouped
from launch.common.text import count, size
from launch.contract.records.memory import CONTEXT, MOST_AT_START

NOTABLE = 2**30
"""Runs of a workload differ by less when they begin."""


def shared_runs(records: Records) -> Mapping[str, int]:
    """Return the bytes that other processes held when a run began, by the id of the run. Runs alone on their GPUs are left out."""
    workloads = grouped(
        ((cell.workload_id, cell.run_spec.engine == "command"), run)
        for cell in records.plan.cells
        for run in records.runs.get(cell.cell_id, ())
    )
    found: dict[str, int] = {}
    for (_, is_command), runs in workloads.items():
        # What an engine holds at the start is known; a user's program may allocate anything before its first step.
        found |= _beyond(runs, None if is_command else MOST_AT_START)
    return found


def _beyond(runs: Sequence[Run], most: int | None) -> dict[str, int]:
    begun = {run.run_id: held for run in runs if run.attempt and (held := _at_start(run.attempt)) is not None}
    least = min(begun.values(), default=0)
    alone, own = (least, least) if most is None else (min(least, most), min(least, CONTEXT))
    return {run_id: held - own for run_id, held in begun.items() if held - alone > NOTABLE}


def _at_start(attempt: Attempt) -> int | None:
    held = (one.memory.device_outside for one in attempt.memory if one.phase == "init")
    return max((outside for outside in held if outside is not None), default=None)


def speed_doubt(run_ids: Iterable[str], shared: Mapping[str, int]) -> str:
    """Return why the times of these runs prove nothing, or an empty text."""
    found = [run_id for run_id in run_ids if run_id in shared]
    if not found:
        return ""
    worst = max(found, key=shared.__getitem__)
    more = f" and of {count('other run', len(found) - 1)}" if found[1:] else ""
    return (
        f"other processes held {size(shared[worst])} on a GPU of {worst}{more} when it began; run the workload's cells again on "
        "free GPUs"
    )
