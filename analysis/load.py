"""From the records of a sweep to frozen dataclasses: what was planned, and what each run left behind.

Nothing is judged here and nothing is filled in. A record that is damaged or missing becomes a sentence in
``Attempt.problems``, so that what reads it can refuse the run by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Optional

import numpy as np
from numpy.typing import NDArray

from launch.files import RecordError, number, read_json, read_json_lines
from launch.record import (
    AttemptPaths,
    Cell,
    GraphStats,
    Memory,
    Outcome,
    OutcomeName,
    Phase,
    Plan,
    RunPaths,
    SweepPaths,
    graph_stats_from_json,
    read_outcome,
    read_plan,
    read_spec,
)
from launch.spec import RunSpec

Metric = Literal["loss", "grad_norm"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

_DAMAGE = (RecordError, OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading a damaged record raises: not JSON, unreadable, or JSON of another shape."""


@dataclass(frozen=True)
class Steps:
    """A run's metrics in the order in which they were written; every array has shape (steps on disk,).

    ``loss`` is in nats a token, ``grad_norm`` is before clipping, times are in milliseconds.
    """

    step: Integers
    loss: Floats
    grad_norm: Floats
    step_time_ms: Floats
    tokens: Integers
    phase: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.step)

    def of(self, metric: Metric) -> Floats:
        return self.loss if metric == "loss" else self.grad_norm

    def take(self, which: Booleans | Integers | slice) -> Steps:
        return Steps(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class PhaseMemory:
    """One rank's memory at the end of one phase."""

    rank: int
    phase: Phase
    memory: Memory


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run. ``captures`` and ``proofs`` are by rank; ``notes`` are what ranks remarked."""

    number: int
    outcome: Outcome
    steps: Steps
    memory: tuple[PhaseMemory, ...]
    captures: Mapping[int, GraphStats]
    proofs: Mapping[int, GraphStats]
    environment: Mapping[str, Any]
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    @cached_property
    def digests(self) -> tuple[tuple[str, str], ...]:
        """What must agree before two runs may be compared: code, libraries, data and a checkpoint. Missing ones are left out."""
        digests = self.environment.get("digests")
        content = {**(digests if isinstance(digests, dict) else {}), "data": self.environment.get("data_digest")}
        return tuple(sorted((name, str(value)) for name, value in content.items() if value))


SAYS_NOTHING: tuple[OutcomeName, ...] = ("CANCELLED", "PREEMPTED", "NODE_FAIL")
"""Outcomes that tell of the scheduler or its user, and nothing of the run: an earlier attempt's result stands."""


@dataclass(frozen=True)
class Run:
    """A cell's repeat. ``attempt`` is the one to go by: see :func:`load_run`."""

    run_id: str
    repeat: int
    begun: int
    """How many attempts were begun, with an outcome or without."""
    attempt: Optional[Attempt]
    earlier: tuple[Attempt, ...] = ()
    """Attempts before it whose results are intact; each may be the partner of a run of its own allocation."""

    def beside(self, partner: Attempt) -> Run:
        """This run by the attempt that shared ``partner``'s allocation, where one did and nothing has ended badly since."""
        if self.attempt is None or not self.attempt.outcome.results_intact:
            return self
        shared = [a for a in self.earlier if a.outcome.allocation == partner.outcome.allocation]
        if not shared or self.attempt.outcome.allocation == partner.outcome.allocation:
            return self
        return replace(self, attempt=shared[-1])

    @property
    def status(self) -> str:
        """The outcome's name, or why there is none."""
        if self.attempt is not None:
            return self.attempt.outcome.outcome
        return "INTERRUPTED" if self.begun else "NOT RUN"


@dataclass(frozen=True)
class Records:
    """A whole sweep. ``runs`` are by cell id, in the order of repeats."""

    plan: Plan
    runs: Mapping[str, tuple[Run, ...]]


def attempts_of(runs: Iterable[Run]) -> list[Attempt]:
    """The attempts to go by, of the runs that have one."""
    return [run.attempt for run in runs if run.attempt is not None]


def load(sweep: SweepPaths) -> Records:
    """All that the analysis reads of ``sweep``.

    Raises:
        FileNotFoundError: the folder holds no plan.
        RecordError: its plan is not JSON.
    """
    plan = read_plan(sweep)
    return Records(plan, {cell.cell_id: _load_cell(sweep, cell) for cell in plan.cells if cell.state == "run"})


def _load_cell(sweep: SweepPaths, cell: Cell) -> tuple[Run, ...]:
    spec = cell.run_spec
    return tuple(load_run(sweep.run(run_id), run_id, repeat, spec) for repeat, run_id in enumerate(cell.run_ids))


def load_run(paths: RunPaths, run_id: str, repeat: int, spec: RunSpec) -> Run:
    """The run, by its latest attempt that has ended, else by none.

    What ended for the scheduler's or the user's reasons says nothing, where an attempt before it ended of itself. A NaN
    or a crash does say something, whatever came before it.
    """
    attempts = paths.attempts()
    ended: list[tuple[AttemptPaths, Outcome]] = []
    for attempt in attempts:
        try:
            outcome = read_outcome(attempt)
        except _DAMAGE:
            continue  # An outcome that cannot be read is none: the run counts as not ended.
        if outcome is not None:
            ended.append((attempt, outcome))
    if not ended:
        return Run(run_id, repeat, len(attempts), None)
    chosen = max(ended, key=lambda item: (item[1].outcome not in SAYS_NOTHING, item[0].number))
    before = [item for item in ended if item[0].number < chosen[0].number and item[1].results_intact]
    loaded = [_load_attempt(*item, paths, run_id, spec.parallelism.world_size) for item in (*before, chosen)]
    return Run(run_id, repeat, len(attempts), loaded[-1], tuple(loaded[:-1]))


def _load_attempt(paths: AttemptPaths, outcome: Outcome, run: RunPaths, run_id: str, ranks: int) -> Attempt:
    problems: list[str] = []
    _check_spec(run, run_id, problems)
    steps = no_steps()
    try:
        steps = read_steps(paths)
    except _DAMAGE as error:
        problems.append(f"metrics.jsonl cannot be read: {_said(error)}")
    environment: Mapping[str, Any] = {}
    try:
        environment = dict(read_json(paths.environment))
    except _DAMAGE as error:
        problems.append(f"environment.json cannot be read: {_said(error)}")
    events = {rank: _read_events(paths, rank, problems) for rank in range(ranks)}
    if outcome.results_intact and any(_is(event, "exception") for lines in events.values() for event in lines):
        problems.append(f"a rank recorded an exception, though the outcome is {outcome.outcome}")
    return Attempt(
        number=paths.number,
        outcome=outcome,
        steps=steps,
        memory=tuple(_memory(events, problems)),
        captures=_graphs(events, "capture", problems),
        proofs=_graphs(events, "proof", problems),
        environment={**environment, **_choices(events)},
        notes=tuple(str(event.get("message", "")) for rank in events for event in events[rank] if _is(event, "note")),
        problems=tuple(problems),
    )


def _check_spec(run: RunPaths, run_id: str, problems: list[str]) -> None:
    try:
        found = read_spec(run.spec).run_id
    except _DAMAGE as error:
        problems.append(f"spec.json cannot be read: {_said(error)}")
        return
    if found != run_id:
        problems.append(f"spec.json is of run {found}, not of {run_id}")


def _said(error: Exception) -> str:
    """The error in words that hold no path of this machine."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _is(event: Mapping[str, Any], kind: str) -> bool:
    return event.get("kind") == kind


def _read_events(paths: AttemptPaths, rank: int, problems: list[str]) -> list[dict[str, Any]]:
    try:
        return [dict(event) for event in read_json_lines(paths.events(rank))]
    except _DAMAGE as error:
        problems.append(f"events of rank {rank} cannot be read: {_said(error)}")
        return []


def _memory(events: Mapping[int, list[dict[str, Any]]], problems: list[str]) -> Iterable[PhaseMemory]:
    for rank, lines in events.items():
        try:
            yield from [
                PhaseMemory(rank, e["phase"], _checked(Memory(**e["memory"]))) for e in lines if _is(e, "phase")
            ]
        except _DAMAGE as error:
            problems.append(f"memory of rank {rank} cannot be read: {_said(error)}")


def _checked(memory: Memory) -> Memory:
    for name, value in vars(memory).items():
        if value is not None and type(value) is not int:
            raise TypeError(f"{name} is {value!r}, not a number of bytes")
    return memory


def _choices(events: Mapping[int, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the engine chose where the spec left it open, as all ranks recorded it: part of what a run ran with. Where
    ranks chose otherwise, all that they chose."""
    found: dict[str, set[str]] = {}
    for lines in events.values():
        for event in lines:
            if _is(event, "choices") and isinstance(event.get("choices"), dict):
                for name, choice in event["choices"].items():
                    found.setdefault(str(name), set()).add(str(choice))
    return {"choices": {name: ", ".join(sorted(found[name])) for name in sorted(found)}} if found else {}


def _graphs(events: Mapping[int, list[dict[str, Any]]], kind: str, problems: list[str]) -> dict[int, GraphStats]:
    """The last such event of each rank that has one."""
    found = {}
    for rank, lines in events.items():
        try:
            for event in lines:
                if _is(event, kind):
                    found[rank] = graph_stats_from_json(event["graphs"])
        except _DAMAGE as error:
            problems.append(f"{kind} of rank {rank} cannot be read: {_said(error)}")
    return found


def read_steps(paths: AttemptPaths) -> Steps:
    """The whole lines of metrics.jsonl; none where there is no such file.

    Raises:
        RecordError: a line before the last is not JSON.
        KeyError, TypeError, ValueError: a line is JSON of another shape.
    """
    try:
        whole = paths.metrics.read_bytes().rpartition(b"\n")[0]
    except FileNotFoundError:
        return no_steps()
    try:
        # One call of the parser for the whole file is four times as fast as one a line.
        lines = json.loads(b"[" + whole.replace(b"\n", b",") + b"]")
    except ValueError:
        lines = list(read_json_lines(paths.metrics))
    return Steps(
        step=np.array([_integer(line["step"]) for line in lines], dtype=np.int64),
        loss=np.array([number(line["loss"]) for line in lines], dtype=np.float64),
        grad_norm=np.array([number(line["grad_norm"]) for line in lines], dtype=np.float64),
        step_time_ms=np.array([number(line["step_time_ms"]) for line in lines], dtype=np.float64),
        tokens=np.array([_integer(line["tokens"]) for line in lines], dtype=np.int64),
        phase=np.array([str(line["phase"]) for line in lines], dtype="U8"),
    )


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} where an integer belongs")
    return value


def no_steps() -> Steps:
    integers, floats = np.empty(0, np.int64), np.empty(0, np.float64)
    return Steps(integers, floats, floats, floats, integers, np.empty(0, "U8"))
