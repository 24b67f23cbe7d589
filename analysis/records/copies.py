"""Find attempts that are copies of each other. One of them is not a run of its own, so neither may be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from analysis.records.run import Attempt, Run
from launch.common.grouped import grouped


def name_copies(cells: Mapping[str, tuple[Run, ...]]) -> dict[str, tuple[Run, ...]]:
    """Return the runs of ``cells``. Add a problem to each attempt whose steps and step times equal another's."""
    every = (run for runs in cells.values() for run in runs)
    found = grouped((attempt.fingerprint, _name(run, attempt)) for run in every for attempt in _whole_attempts(run))
    return {cell: tuple(_with_problems(run, found) for run in runs) for cell, runs in cells.items()}


def _whole_attempts(run: Run) -> Iterable[Attempt]:
    return (attempt for attempt in (*run.earlier, run.attempt) if attempt is not None and len(attempt.steps))


def _name(run: Run, attempt: Attempt) -> str:
    return f"attempt {attempt.number} of run {run.run_id}"


def _with_problems(run: Run, found: Mapping[tuple[object, ...], list[str]]) -> Run:
    marked = {attempt.number: _mark(run, attempt, found[attempt.fingerprint]) for attempt in _whole_attempts(run)}
    earlier = tuple(marked.get(attempt.number, attempt) for attempt in run.earlier)
    return replace(run, attempt=run.attempt and marked.get(run.attempt.number, run.attempt), earlier=earlier)


def _mark(run: Run, attempt: Attempt, names: list[str]) -> Attempt:
    others = [name for name in names if name != _name(run, attempt)]
    problem = f"its steps and their times are those of {', '.join(others)}: one is a copy"
    return replace(attempt, problems=(*attempt.problems, problem)) if others else attempt
