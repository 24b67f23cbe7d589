"""Load the plan and the runs of a sweep.

Nothing is judged or filled in here. A damaged or missing record becomes a sentence in ``Attempt.problems``, so that readers can
refuse the run by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

from analysis.records.copies import name_copies
from analysis.records.edited_code import name_edits
from analysis.records.events import (
    DAMAGE,
    Events,
    Found,
    all_of_kind,
    choices_of,
    describe_error,
    is_of,
    last_of_kind,
    measured_clocks,
    measured_seconds,
    memory_of,
    notes_of,
    parameter_digests,
    read_events,
)
from analysis.records.run import Attempt, PartialAttempt, Run, digests_of
from analysis.records.steps import Steps, no_steps, read_steps
from launch.common.atomic_files import RecordError, dumps, parse_record
from launch.common.grouped import grouped
from launch.common.typed_json import from_json
from launch.contract.bundle import attempts_due, latest_outcomes, read_beginnings, read_intact_order, runs_not_needed
from launch.contract.outcomes import DAMAGED_OUTCOME_REMEDY, Outcome, read_outcome
from launch.contract.paths import AttemptPaths, RunPaths, SweepPaths
from launch.contract.plan import Cell, Plan, PlannedBundle, read_plan
from launch.contract.records.gpu_rates import GpuRates
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.identity import without_identity
from launch.contract.records.imported_module import ImportedModule
from launch.contract.records.inspection import Inspection
from launch.contract.records.kernels import Kernels
from launch.contract.records.probe import Launches, Probe
from launch.contract.records.sketch import ChangedTensor, Sketch, StepSketch
from launch.contract.records.state_changes import StateChanges
from launch.contract.records.step_check import StepCheck
from launch.contract.skipped_runs import why_skipped
from launch.contract.spec import RunSpec, read_spec

LONGEST_CAPTURE = 1e9
"""In seconds. A longer capture is a damaged record: this is more than thirty years."""


@dataclass(frozen=True)
class Records:
    """The records of a sweep. ``runs`` maps a cell id to its runs, in the order of repeats."""

    plan: Plan
    runs: Mapping[str, tuple[Run, ...]]
    skipped: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """For each cell id, why repeats were not begun, by the repeat. ``runs`` leaves them out."""


def load(sweep: SweepPaths) -> Records:
    """Load everything that the analysis reads of ``sweep``.

    Raises:
        FileNotFoundError: the folder holds no plan.
        RecordError: its plan is damaged or of another version.
    """
    return load_planned(sweep, read_made(sweep))


def read_made(sweep: SweepPaths) -> Plan:
    """Return the plan of ``sweep`` without the runs that no verdict needed.

    Raises:
        FileNotFoundError: the folder holds no plan.
        RecordError: the plan is damaged or of another version.
    """
    plan = read_plan(sweep)
    bundles = plan.bundles if plan.looks else ()
    dropped = {run_id for one in bundles for run_id in runs_not_needed(sweep.bundle(one.bundle_id))}
    # A run that has begun counts, even if verdicts did not need it.
    return without_runs(plan, {run_id for run_id in dropped if not sweep.run(run_id).attempt_numbers()})


def without_runs(plan: Plan, run_ids: Set[str]) -> Plan:
    """Return ``plan`` without ``run_ids`` in its cells."""
    kept = ((cell, tuple(run_id for run_id in cell.run_ids if run_id not in run_ids)) for cell in plan.cells)
    return replace(plan, cells=tuple(replace(cell, run_ids=ids) for cell, ids in kept)) if run_ids else plan


def load_planned(sweep: SweepPaths, plan: Plan) -> Records:
    """Load the records of the cells of ``plan``.

    Raises:
        RecordError: a cell of the plan has the spec of another one.
    """
    cells = {cell.cell_id: cell for cell in plan.cells if cell.state == "run"}
    workloads = {cell.workload_id for cell in cells.values()}
    bundles = [bundle for bundle in plan.all_bundles if bundle.workload_id in workloads]
    due = _attempts_due(sweep, bundles)
    begun = grouped(key for bundle in bundles for key in read_beginnings(sweep.bundle(bundle.bundle_id)))
    runs = {cell_id: _load_cell(sweep, cell, due, begun) for cell_id, cell in cells.items()}
    skipped = {cell_id: _skipped(sweep, of_cell, plan) for cell_id, of_cell in runs.items()}
    wanted = {cell_id: _wanted(of_cell, skipped[cell_id].keys(), plan) for cell_id, of_cell in runs.items()}
    return Records(plan, name_edits(name_copies(wanted)), skipped)


def _attempts_due(sweep: SweepPaths, bundles: Sequence[PlannedBundle]) -> Callable[[str], int]:
    """Return a function that reads the number of a run's attempt that is ordered and not cancelled; 0 without one."""
    read = cache(lambda bundle_id: attempts_due(sweep.bundle(bundle_id)))
    return lambda run_id: max((read(b.bundle_id).get(run_id, 0) for b in bundles if run_id in b.run_ids), default=0)


def _load_cell(
    sweep: SweepPaths, cell: Cell, due: Callable[[str], int], begun: Mapping[str, Sequence[int]]
) -> tuple[Run, ...]:
    spec = cell.run_spec
    try:
        found = spec.cell_id
    except TypeError as error:
        found = f"no cell ({error})"
    if found != cell.cell_id:
        raise RecordError(
            f"{sweep.plan}: cell {cell.cell_id} has the spec of {found}; run the sweep again to write a new plan"
        )
    runs = (
        load_run(sweep.run(name), number, spec, due, begun.get(name, ())) for number, name in enumerate(cell.run_ids)
    )
    return tuple(replace(run, perturbed=run.run_id not in cell.repeat_ids) for run in runs)


def _skipped(sweep: SweepPaths, runs: Sequence[Run], plan: Plan) -> dict[int, str]:
    """Return why ``runs`` of a cell were not begun, since they would have been in vain, by the repeat."""
    unbegun = {run.run_id: run.repeat for run in runs if not run.begun}
    bundles = (bundle for bundle in plan.bundles if unbegun and not unbegun.keys().isdisjoint(bundle.run_ids))
    order = next((read_intact_order(sweep.bundle(bundle.bundle_id)) for bundle in bundles), None)
    outcome_of = latest_outcomes(sweep, order)
    reasons = ((repeat, why_skipped(run_id, outcome_of, plan.precedents)) for run_id, repeat in unbegun.items())
    return {repeat: reason for repeat, reason in reasons if reason}


def _wanted(runs: Iterable[Run], skipped: Set[int], plan: Plan) -> tuple[Run, ...]:
    """Return ``runs`` of a cell, except those that did not begin and count for nothing.

    These are the repeats in ``skipped``, and optional runs, which begin only if a verdict needs them.
    """
    return tuple(run for run in runs if run.begun or not (run.repeat in skipped or run.run_id in plan.runs_if_needed))


def load_run(
    paths: RunPaths, repeat: int, spec: RunSpec, due: Callable[[str], int] = lambda _: 0, begun: Sequence[int] = ()
) -> Run:
    """Load a run with the attempt that counts: the latest one that ended.

    An attempt that the scheduler or the user ended gives way to an earlier one that ended on its own, and to a later one that has
    not ended, or that is ``due``: ordered, but not begun. A NaN or a crash always counts. No attempt counts if a later outcome
    cannot be read. An attempt has begun even without a folder if it is in ``begun``, or if the next one has a folder.
    """
    numbers = {one for number in (*paths.attempt_numbers(), *begun) for one in (number - 1, number) if one > 0}
    attempts = {number: paths.attempt(number) for number in sorted(numbers)}
    run_id, (ended, unreadable) = paths.run_id, _read_outcomes(attempts.values())
    damaged = tuple(unreadable.values())
    chosen = max(ended, key=lambda number: (ended[number].is_informative, number), default=0)
    is_replaced = chosen != 0 and not ended[chosen].is_informative and max(*attempts, due(run_id)) > max(ended)
    if chosen == 0 or is_replaced or chosen < max(unreadable, default=0):
        return Run(run_id, repeat, len(attempts), None, damaged=damaged)
    whole = {
        number: _load_attempt(attempts[number], outcome, paths, spec)
        for number, outcome in ended.items()
        if number == chosen or (number < chosen and outcome.results_intact)
    }
    others = (attempts[number] for number in attempts if number not in {*whole, *unreadable})
    partial = tuple(_load_partial(attempt, ended.get(attempt.number), spec) for attempt in others)
    latest = whole.pop(chosen)
    return Run(run_id, repeat, len(attempts), latest, tuple(whole.values()), partial, damaged)


def _read_outcomes(attempts: Iterable[AttemptPaths]) -> tuple[dict[int, Outcome], dict[int, str]]:
    """Return the outcomes of ``attempts``, and why the others cannot be read, both by attempt number."""
    ended: dict[int, Outcome] = {}
    unreadable: dict[int, str] = {}
    for attempt in attempts:
        try:
            outcome = read_outcome(attempt)
        except DAMAGE as error:
            unreadable[attempt.number] = _unreadable(attempt, error)
        else:
            ended |= {attempt.number: outcome} if outcome else {}
    return ended, unreadable


def _unreadable(attempt: AttemptPaths, error: Exception) -> str:
    name = attempt.outcome.name
    why = describe_error(error).removeprefix(f"{name}: ")
    file = f"runs/{attempt.run_id}/attempts/{attempt.number}/{name}"
    return f"{file} cannot be read: {why}; fix: {DAMAGED_OUTCOME_REMEDY}"


def _load_partial(paths: AttemptPaths, outcome: Outcome | None, spec: RunSpec) -> PartialAttempt:
    problems: list[str] = []
    steps, environment = _read_steps(paths, problems), {}
    # An attempt may end before it describes its environment.
    if paths.environment.exists():
        environment = _read_environment(paths, problems)
    # The curve can contradict a verdict even if events are damaged, so damaged events are not a problem of the attempt.
    events = read_events(paths, spec.parallelism.world_size, []) if spec.checked_steps else {}
    checks = all_of_kind(events, "step_check", _step_check, [])
    return PartialAttempt(paths.number, outcome, digests_of(environment), tuple(problems), steps, checks)


def _load_attempt(paths: AttemptPaths, outcome: Outcome, run: RunPaths, spec: RunSpec) -> Attempt:
    problems: list[str] = []
    _check_spec(run, problems)
    steps, environment = _read_steps(paths, problems), _read_environment(paths, problems)
    events = read_events(paths, spec.parallelism.world_size, problems)
    if outcome.results_intact and any(is_of(event, "exception") for lines in events.values() for event in lines):
        problems.append(f"a rank recorded an exception, but the outcome is {outcome.outcome}")
    return Attempt(
        paths.number,
        outcome,
        _shared(dumps({**environment, **choices_of(events)})),
        notes_of(events),
        pid=next((str(event.get("pid")) for event in events[0]), ""),
        steps=steps,
        memory=memory_of(events, problems),
        captures=last_of_kind(events, "capture", _graph_stats, problems),
        proofs=last_of_kind(events, "proof", _graph_stats, problems),
        probes=last_of_kind(events, "probe", _read(Probe, "probe"), problems),
        # Damaged kernels and rates are left out, because no verdict uses them.
        kernels=last_of_kind(events, "probe", _read(Kernels, "kernels"), []),
        launches=last_of_kind(events, "probe", _read(Launches, "launches"), problems),
        rates=last_of_kind(events, "rates", _read(GpuRates, "rates"), []),
        parameters=parameter_digests(events),
        parameter_ends=_by_place(
            last_of_kind(events, "parameters", _read(tuple[ChangedTensor, ...], "sketches"), problems)
        ),
        other_state=last_of_kind(events, "other_state", _read(StateChanges, "changes"), problems),
        sketches=_by_step(all_of_kind(events, "gradients", _read(StepSketch, "sketch"), problems)),
        imports=_imports(events, problems),
        inspections=last_of_kind(events, "inspection", _read(Inspection, "inspection"), problems),
        step_checks=all_of_kind(events, "step_check", _step_check, problems),
        clocks=measured_clocks(events, problems),
        measured_seconds=measured_seconds(events, problems),
        # Last, because the calls above append to it.
        problems=tuple(problems),
    )


def _read_steps(paths: AttemptPaths, problems: list[str]) -> Steps:
    try:
        return read_steps(paths)
    except DAMAGE as error:
        problems.append(f"metrics.jsonl cannot be read: {describe_error(error)}")
        return no_steps()


def _read_environment(paths: AttemptPaths, problems: list[str]) -> dict[str, Any]:
    try:
        return without_identity(paths, parse_record(paths.read(paths.environment), paths.environment))
    except DAMAGE as error:
        problems.append(f"environment.json cannot be read: {describe_error(error)}")
        return {}


@lru_cache(maxsize=4096)
def _shared(environment: str) -> Mapping[str, Any]:
    """Return one object for the many runs with the same environment."""
    content: dict[str, Any] = json.loads(environment)
    return content


def _check_spec(run: RunPaths, problems: list[str]) -> None:
    """Add a problem if the run's own spec belongs to another run."""
    try:
        if (found := read_spec(run.spec).run_id) != run.run_id:
            problems.append(f"spec.json is of run {found}, not of {run.run_id}")
    except DAMAGE as error:
        problems.append(f"spec.json cannot be read: {describe_error(error)}")


def _read(kind: type[Found], key: str) -> Callable[[Mapping[str, Any]], Found]:
    return lambda event: from_json(kind, event[key])


def _by_place(found: Mapping[int, Sequence[ChangedTensor]]) -> dict[tuple[int, str], ChangedTensor]:
    return {(rank, one.last.name): one for rank, parameters in found.items() for one in parameters}


def _graph_stats(event: Mapping[str, Any]) -> GraphStats:
    stats = from_json(GraphStats, event["graphs"])
    if stats.capture_seconds > LONGEST_CAPTURE:
        raise ValueError(f"capture_seconds is {stats.capture_seconds!r}, not a number of seconds")
    return stats


def _step_check(event: Mapping[str, Any]) -> StepCheck:
    check = from_json(StepCheck, event["check"])
    if check.step != event["step"]:
        raise ValueError(f"a check of step {check.step} was recorded in step {event['step']}")
    if event["phase"] not in ("settle", "measure"):
        raise ValueError(
            f"a check of step {check.step} was recorded in phase {event['phase']}, where nothing is replayed"
        )
    return check


def _imports(events: Events, problems: list[str]) -> Mapping[str, ImportedModule]:
    """Return the modules that rank 0 recorded. Of a module recorded twice, the first record counts."""
    found = all_of_kind(events, "imports", lambda event: _modules(dumps(event["modules"])), problems)
    return {name: module for modules in reversed(found.get(0, ())) for name, module in modules.items()}


@lru_cache(maxsize=4096)
def _modules(content: str) -> Mapping[str, ImportedModule]:
    """Return one object for the many runs that import the same modules."""
    return {name: from_json(ImportedModule, module) for name, module in json.loads(content).items()}


def _by_step(found: Mapping[int, list[StepSketch]]) -> dict[int, dict[tuple[int, str], Sketch]]:
    steps: dict[int, dict[tuple[int, str], Sketch]] = {}
    for rank, sketches in found.items():
        for sketch in sketches:
            steps.setdefault(sketch.step, {}).update({(rank, one.name): one for one in sketch.gradients})
    return steps
