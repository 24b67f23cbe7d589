"""Find attempts that are copies of each other. One of them is not a run of its own, so neither may be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from analysis.records.run import Attempt, Run
from launch.common.grouped import grouped


def name_copies(cells: Mapping[str, tuple[Run, ...]]) -> dict[str, tuple[Run, ...]]:
    """Return the runs of ``cells``. Add a problem to each attempt whose steps and step times equal another's."""
    every = ((run, attempt) for runs in cells.values() for run in runs for attempt in run.whole)
    names = grouped((attempt.fingerprint, _name(run, attempt)) for run, attempt in every if len(attempt.steps))
    return {cell: tuple(run.with_whole(partial(_mark, run, names)) for run in runs) for cell, runs in cells.items()}


def _name(run: Run, attempt: Attempt) -> str:
    return f"attempt {attempt.number} of run {run.run_id}"


def _mark(run: Run, names: Mapping[tuple[object, ...], Sequence[str]], attempt: Attempt) -> Attempt:
    others = [name for name in names.get(attempt.fingerprint, ()) if name != _name(run, attempt)]
    problem = f"its steps and their times are those of {', '.join(others)}: one is a copy"
    return replace(attempt, problems=(*attempt.problems, problem)) if others else attempt
