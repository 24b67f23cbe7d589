"""Load the plan and the runs of a sweep.

Nothing is judged or filled in here. A damaged or missing record becomes a sentence in ``Attempt.problems``, so that readers can
refuse the run by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from analysis.records.events import (
    DAMAGE,
    choices_of,
    describe_error,
    is_of,
    last_of_kind,
    measured_clocks,
    memory_of,
    notes_of,
    read_events,
)
from analysis.records.run import Attempt, FailedAttempt, Recorded, Run, digests_of
from analysis.records.steps import no_steps, read_steps
from launch.common.atomic_files import dumps, number, read_json
from launch.contract.outcomes import DAMAGED_OUTCOME_REMEDY, Outcome, read_outcome
from launch.contract.paths import AttemptPaths, RunPaths, SweepPaths
from launch.contract.plan import Cell, Plan, read_plan
from launch.contract.records.graph_stats import GraphStats, graph_stats_from_json
from launch.contract.records.inspection import Inspection, inspection_from_json
from launch.contract.records.probe import Probe, probe_from_json
from launch.contract.spec import RunSpec, read_spec

LONGEST_CAPTURE = 1e9
"""Seconds: more than thirty years, longer than any capture."""


@dataclass(frozen=True)
class Records:
    """The records of a sweep. ``runs`` maps a cell id to its runs, in the order of repeats."""

    plan: Plan
    runs: Mapping[str, tuple[Run, ...]]


def load(sweep: SweepPaths) -> Records:
    """Load everything that the analysis reads of ``sweep``.

    Raises:
        FileNotFoundError: the folder holds no plan.
        RecordError: its plan is not JSON.
    """
    return load_planned(sweep, read_plan(sweep))


def load_planned(sweep: SweepPaths, plan: Plan) -> Records:
    """Load the records of the cells of ``plan``."""
    return Records(plan, {cell.cell_id: _load_cell(sweep, cell) for cell in plan.cells if cell.state == "run"})


def _load_cell(sweep: SweepPaths, cell: Cell) -> tuple[Run, ...]:
    spec = cell.run_spec
    return tuple(load_run(sweep.run(run_id), run_id, repeat, spec) for repeat, run_id in enumerate(cell.run_ids))


def load_run(paths: RunPaths, run_id: str, repeat: int, spec: RunSpec) -> Run:
    """Load a run with the attempt that counts: the latest one that ended.

    An attempt that the scheduler or the user ended gives way to an earlier one that ended on its own. A NaN or a crash always
    counts. No attempt counts if a later outcome cannot be read.
    """
    attempts = paths.attempts()
    ended: list[tuple[AttemptPaths, Outcome]] = []
    unreadable: dict[int, str] = {}
    for attempt in attempts:
        try:
            outcome = read_outcome(attempt)
        except DAMAGE as error:
            unreadable[attempt.number] = _unreadable(run_id, attempt, error)
            continue
        if outcome is not None:
            ended.append((attempt, outcome))
    damaged = tuple(unreadable.values())
    chosen = max(ended, key=lambda item: (item[1].is_informative, item[0].number), default=None)
    if chosen is None or chosen[0].number < max(unreadable, default=0):
        return Run(run_id, repeat, len(attempts), None, damaged=damaged)
    before = [item for item in ended if item[0].number < chosen[0].number and item[1].results_intact]
    loaded = [_load_attempt(*item, paths, run_id, spec.parallelism.world_size) for item in (*before, chosen)]
    failed = (item for item in ended if item[0].number < chosen[0].number and item[1].is_own_failure)
    alike = (FailedAttempt(a.number, outcome) for a, outcome in failed if _may_have_run(a, loaded[-1].digests))
    return Run(run_id, repeat, len(attempts), loaded[-1], tuple(loaded[:-1]), tuple(alike), damaged)


def _unreadable(run_id: str, attempt: AttemptPaths, error: Exception) -> str:
    name = attempt.outcome.name
    why = describe_error(error).removeprefix(f"{name}: ")
    file = f"runs/{run_id}/attempts/{attempt.number}/{name}"
    return f"{file} cannot be read: {why}; fix: {DAMAGED_OUTCOME_REMEDY}"


def _may_have_run(paths: AttemptPaths, digests: tuple[tuple[str, str], ...]) -> bool:
    """Return whether the attempt ran the code, libraries and data of ``digests``, as far as its records show."""
    try:
        return digests_of(dict(read_json(paths.environment))) in (digests, ())
    except DAMAGE:
        return True


def _load_attempt(paths: AttemptPaths, outcome: Outcome, run: RunPaths, run_id: str, ranks: int) -> Attempt:
    problems: list[str] = []
    _check_spec(run, run_id, problems)
    steps = no_steps()
    try:
        steps = read_steps(paths)
    except DAMAGE as error:
        problems.append(f"metrics.jsonl cannot be read: {describe_error(error)}")
    environment: Mapping[str, Any] = {}
    try:
        environment = dict(read_json(paths.environment))
    except DAMAGE as error:
        problems.append(f"environment.json cannot be read: {describe_error(error)}")
    events = read_events(paths, ranks, problems)
    if outcome.results_intact and any(is_of(event, "exception") for lines in events.values() for event in lines):
        problems.append(f"a rank recorded an exception, but the outcome is {outcome.outcome}")
    recorded = Recorded(
        steps=steps,
        memory=tuple(memory_of(events, problems)),
        captures=last_of_kind(events, "capture", _graph_stats, problems),
        proofs=last_of_kind(events, "proof", _graph_stats, problems),
        probes=last_of_kind(events, "probe", _probe, problems),
        inspections=last_of_kind(events, "inspection", _inspection, problems),
        clocks=measured_clocks(events, problems),
    )
    environment = _shared(dumps({**environment, **choices_of(events)}))
    return Attempt(paths.number, outcome, environment, notes_of(events), tuple(problems), recorded)


@lru_cache(maxsize=4096)
def _shared(environment: str) -> Mapping[str, Any]:
    """Return one object for the many runs with the same environment."""
    content: dict[str, Any] = json.loads(environment)
    return content


def _check_spec(run: RunPaths, run_id: str, problems: list[str]) -> None:
    try:
        found = read_spec(run.spec).run_id
    except DAMAGE as error:
        problems.append(f"spec.json cannot be read: {describe_error(error)}")
        return
    if found != run_id:
        problems.append(f"spec.json is of run {found}, not of {run_id}")


def _graph_stats(event: Mapping[str, Any]) -> GraphStats:
    stats = graph_stats_from_json(event["graphs"])
    seconds = number(stats.capture_seconds)
    if not 0 <= seconds <= LONGEST_CAPTURE:
        raise ValueError(f"capture_seconds is {seconds!r}, not a number of seconds")
    if not all(isinstance(text, str) for text in (stats.impl, stats.mechanism, *stats.effective_scope)):
        raise TypeError("the implementation, its mechanism or its scope is not text")
    return replace(stats, capture_seconds=seconds)


def _probe(event: Mapping[str, Any]) -> Probe:
    return probe_from_json(event["probe"])


def _inspection(event: Mapping[str, Any]) -> Inspection:
    return inspection_from_json(event["inspection"])
