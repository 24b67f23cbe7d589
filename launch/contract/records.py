"""What a run leaves behind: the shapes of records, spelt once. launch/contract/paths.py says where they stand.

Every event holds time (seconds since the epoch), kind, phase and step. Kinds: "enter" (a phase begins; the first one
also holds the rank's pid), "phase" (it ended: memory, clocks, seconds), "choices" (what the engine chose), "capture" and
"proof" (graphs: GraphStats), "probe" (Probe), "inspection" (launch.contract.inspection.Inspection), "note" (message),
"exception" (type, message, traceback). Digests of layers are in launch/contract/layer_digests.py.

Loading a record parses JSON and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Optional, get_args

from launch.common.atomic_files import RecordError, number, read_json, read_json_lines
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.spec import RunSpec, spec_from_json

Phase = Literal["init", "build", "warmup", "capture", "settle", "measure", "probe", "teardown"]
PHASES: tuple[Phase, ...] = get_args(Phase)

OutcomeName = Literal[
    "COMPLETED", "CUDA_OOM", "HOST_OOM", "CAPTURE_FAILED", "NUMERIC", "HANG", "TEARDOWN_HANG", "CONFIG", "ENVIRONMENT",
    "NODE_FAIL", "TIMEOUT", "PREEMPTED", "CANCELLED", "FAILED",
]  # fmt: skip
OUTCOMES: tuple[OutcomeName, ...] = get_args(OutcomeName)
RESULTS_INTACT: tuple[OutcomeName, ...] = ("COMPLETED", "TEARDOWN_HANG")
"""Outcomes after which every step of the run is on disk."""

CellState = Literal["run", "rejected", "not_runnable"]


# --- the plan -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reason:
    """Why a cell is not run: the rule's id, what it saw, the way out, and where the rule comes from."""

    rule: str
    message: str
    remedy: str
    source: str = ""


@dataclass(frozen=True)
class Expectation:
    """What a recipe expects of a cell. ``phase`` None is any phase."""

    outcome: OutcomeName = "COMPLETED"
    phase: Optional[Phase] = None


@dataclass(frozen=True)
class Margins:
    """What counts as equal: loss in absolute terms (nats), gradient norm relative to the eager value."""

    loss: float = 1e-3
    grad_norm: float = 1e-2


@dataclass(frozen=True)
class Limits:
    """When a run is ended: after ``run_seconds``, or when its records have not grown for ``hang_seconds``. No digest
    holds them, since they change nothing that a run computes."""

    run_seconds: float = 1800.0
    hang_seconds: float = 600.0


@dataclass(frozen=True)
class Cell:
    """One resolved configuration. ``label`` says in words what sets it apart in its sweep."""

    cell_id: str
    label: str
    workload_id: str
    task_id: str
    spec: Mapping[str, Any]
    state: CellState
    reasons: tuple[Reason, ...]
    expect: Expectation
    run_ids: tuple[str, ...]
    limits: Limits = Limits()

    @property
    def run_spec(self) -> RunSpec:
        """The cell's spec, repeat 0."""
        return spec_from_json(self.spec)

    @property
    def graphed(self) -> bool:
        return bool(self.spec["cuda_graph"]["impl"] != "none")


@dataclass(frozen=True)
class PlannedBundle:
    """The runs of one workload that share an allocation, in the order in which they are to run."""

    bundle_id: str
    workload_id: str
    run_ids: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What a sweep is: written by the orchestrator before anything is submitted."""

    name: str
    recipe: str
    """The resolved recipe, as YAML."""
    recipe_file: str
    """The name of the file it came from, without its folder."""
    margins: Margins
    cells: tuple[Cell, ...]
    bundles: tuple[PlannedBundle, ...]
    tracking: Optional[Mapping[str, Any]] = None
    """What launch.supervise.wandb_tracker is told of the sweep; None is no tracking."""
    scheduler: Literal["host", "slurm"] = "host"
    """Whom cells were judged against: the host that planned, or a Slurm cluster."""
    cluster: str = ""
    """The profile of that cluster, by name; its content is the site's, and stays out of records."""
    only: tuple[str, ...] = ()
    """What cells were picked by, "key=value" each; empty where the recipe's are all there."""

    def cell_of_run(self) -> Mapping[str, Cell]:
        return self._cell_of_run

    @cached_property
    def _cell_of_run(self) -> dict[str, Cell]:
        return {run_id: cell for cell in self.cells for run_id in cell.run_ids}


def plan_to_json(plan: Plan) -> dict[str, Any]:
    content = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    content["margins"] = dataclasses.asdict(plan.margins)
    content["cells"] = [_shallow(cell) | {
        "reasons": [dataclasses.asdict(reason) for reason in cell.reasons],
        "expect": dataclasses.asdict(cell.expect),
        "limits": dataclasses.asdict(cell.limits),
    } for cell in plan.cells]  # fmt: skip
    content["bundles"] = [_shallow(bundle) for bundle in plan.bundles]
    return content


def plan_from_json(content: Mapping[str, Any]) -> Plan:
    cells = tuple(
        Cell(**cell | {
            "reasons": tuple(Reason(**reason) for reason in cell["reasons"]),
            "expect": Expectation(**cell["expect"]),
            "run_ids": tuple(cell["run_ids"]),
            "limits": Limits(**cell["limits"]),
        })
        for cell in content["cells"]
    )  # fmt: skip
    bundles = tuple(PlannedBundle(**bundle | {"run_ids": tuple(bundle["run_ids"])}) for bundle in content["bundles"])
    margins, only = Margins(**content["margins"]), tuple(content.get("only", ()))
    return Plan(**dict(content) | {"margins": margins, "cells": cells, "bundles": bundles, "only": only})


def _shallow(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


# --- what a run writes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. ``loss`` is the mean over the global batch (nats a token), ``grad_norm`` is before clipping."""

    step: int
    loss: float
    grad_norm: float
    step_time_ms: float
    tokens: int
    phase: Phase


@dataclass(frozen=True)
class Memory:
    """Bytes at a phase's end. Peaks are over the phase. On a CPU the device figures are None, on a GPU none is.

    ``device_outside`` is what the driver counts as used on the device beyond the allocator's reservation.
    """

    host_rss: int
    host_peak_rss: int
    allocated: Optional[int] = None
    peak_allocated: Optional[int] = None
    reserved: Optional[int] = None
    peak_reserved: Optional[int] = None
    graph_pool: Optional[int] = None
    device_outside: Optional[int] = None


ClockReason = Literal["power_cap", "thermal", "sync_boost", "hardware_slowdown", "hardware_thermal", "power_brake"]
"""What lowers the clocks of a GPU. An idle GPU and clocks that somebody has set are no throttling and have no name."""
CLOCK_REASONS: tuple[ClockReason, ...] = get_args(ClockReason)


@dataclass(frozen=True)
class Clocks:
    """What a GPU's driver says of its clocks over ``seconds``, a phase.

    ``throttled`` holds the seconds for which each reason that the driver counts lowered them. ``active`` are the reasons at
    work at the phase's beginning or end, None where it does not say; ``power_limits`` the limits in force then, in watts.
    Clocks are of the multiprocessors, at its end.
    """

    seconds: float
    throttled: Mapping[ClockReason, float]
    active: Optional[tuple[ClockReason, ...]] = None
    power_limits: tuple[float, ...] = ()
    sm_mhz: Optional[int] = None
    max_sm_mhz: Optional[int] = None


@dataclass(frozen=True)
class GraphStats:
    """What an engine says of its graphs; the evidence that what was captured is what ran.

    ``replays`` counts replays since the capture, ``expected_replays`` what they must be if every step after the
    capture ran from graphs. For torch_compile on a CPU a "graph" is a compiled frame and a "replay" its execution.
    """

    impl: str
    effective_scope: tuple[str, ...] = ()
    mechanism: str = ""
    """In words, what the implementation is here: "compiled without CUDA graphs (CPU)"."""
    graphs: int = 0
    replays: int = 0
    expected_replays: int = 0
    recompilations: int = 0
    """How often the model was compiled anew: by torch_compile, and in an eager run by ``training.compile: whole``."""
    capture_seconds: float = 0.0
    launches_per_step: int = 0
    """CUDA graph launches that a step takes if all of it that was captured runs from graphs; 0 where there are none."""

    @property
    def proven(self) -> bool:
        return self.graphs > 0 and self.replays == self.expected_replays > 0 and self.recompilations == 0


@dataclass(frozen=True)
class Probe:
    """What the profiler saw of some steps after the timed ones, on one rank; means over those steps.

    ``busy_ms`` is the union of the intervals in which the device worked, ``computing_ms`` that without the kernels that
    communicate, which also wait. ``host_ms`` is what the host took to enqueue a step onto an idle device, without the
    profiler; None where it waits for the device in a step, so that its time would be the device's.
    """

    graph_launches: float
    kernels: float
    busy_ms: float
    computing_ms: float
    host_ms: Optional[float]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. ``failure_class`` and ``remedy`` are empty where it completed."""

    outcome: OutcomeName
    phase: Phase
    allocation: str
    started: float
    ended: float
    rank: Optional[int] = None
    failure_class: str = ""
    message: str = ""
    remedy: str = ""
    exit_code: Optional[int] = None
    node: str = ""
    """Where the rank that failed first ran, as Slurm names it; empty where nobody knows, or there is no Slurm."""
    infrastructure: bool = False
    """Whether nodes, network or scheduler caused it: such an ending says nothing of the run."""

    @property
    def results_intact(self) -> bool:
        return self.outcome in RESULTS_INTACT

    def matches(self, expected: Expectation) -> bool:
        return self.outcome == expected.outcome and expected.phase in (None, self.phase)


def outcome_from_json(content: Mapping[str, Any]) -> Outcome:
    """Raises TypeError where a field is missing, unknown or of another kind."""
    outcome = Outcome(**content)
    texts = ("allocation", "failure_class", "message", "remedy", "node")
    sound = {
        "outcome": outcome.outcome in OUTCOMES,
        "phase": outcome.phase in PHASES,
        "infrastructure": type(outcome.infrastructure) is bool,
        **{name: type(getattr(outcome, name)) is str for name in texts},
        **{name: _is_time(getattr(outcome, name)) for name in ("started", "ended")},
        **{name: type(getattr(outcome, name)) in (int, NoneType) for name in ("rank", "exit_code")},
    }
    for name, right in sound.items():
        if not right:
            raise TypeError(f"{name} of an outcome is {getattr(outcome, name)!r}")
    return outcome


def _is_time(value: object) -> bool:
    """Whether it is in seconds since the epoch, of a year that has four digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 253_402_300_800


# --- reading back ---------------------------------------------------------------------------------------------------


def read_plan(sweep: SweepPaths) -> Plan:
    return plan_from_json(read_json(sweep.plan))


def read_spec(path: Path) -> RunSpec:
    return spec_from_json(read_json(path))


DAMAGED_OUTCOME_REMEDY = "move its folder away; resume makes the run again"
"""For an attempt whose outcome cannot be read."""


def read_outcome(attempt: AttemptPaths) -> Optional[Outcome]:
    """How the attempt ended, or None where it has not.

    Raises:
        RecordError: it has, and its record is damaged.
    """
    try:
        return outcome_from_json(read_json(attempt.outcome))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise RecordError(f"{attempt.outcome.name}: not an outcome of this version ({error})") from error


def read_metrics(attempt: AttemptPaths) -> Iterator[StepMetrics]:
    for line in read_json_lines(attempt.metrics):
        yield StepMetrics(**step_from_json(line))


def step_from_json(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl with numbers for the strings that NaN and the infinities are written as."""
    return {**line, **{key: number(line[key]) for key in ("loss", "grad_norm", "step_time_ms")}}


def read_events(attempt: AttemptPaths, rank: int) -> Iterator[dict[str, Any]]:
    return read_json_lines(attempt.events(rank))


def graph_stats_from_json(content: Mapping[str, Any]) -> GraphStats:
    """Raises TypeError where a count is no whole number, or a field is missing or unknown."""
    for name in ("graphs", "replays", "expected_replays", "recompilations", "launches_per_step"):
        if type(content[name]) is not int:
            raise TypeError(f"{name} is {content[name]!r}, not a whole number")
    return GraphStats(**dict(content) | {"effective_scope": tuple(content["effective_scope"])})


def clocks_from_json(content: Mapping[str, Any]) -> Clocks:
    """Raises TypeError or ValueError where a figure is no number from 0 on, a reason is none, or a field is unknown."""
    active = content["active"]
    clocks = Clocks(
        **dict(content)
        | {"active": None if active is None else tuple(active), "power_limits": tuple(content["power_limits"])}
    )
    speeds = [value for value in (clocks.sm_mhz, clocks.max_sm_mhz) if value is not None]
    for value in (clocks.seconds, *clocks.throttled.values(), *clocks.power_limits, *speeds):
        if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{value!r} is no number from 0 on")
    if strange := {*clocks.throttled, *(clocks.active or ())} - {*CLOCK_REASONS}:
        raise ValueError(f"{sorted(map(str, strange))} are no reasons for lower clocks")
    return clocks


def probe_from_json(content: Mapping[str, Any]) -> Probe:
    """Raises TypeError or ValueError where a figure is no number from 0 on, or a field is missing or unknown."""
    for name, value in content.items():
        if name == "host_ms" and value is None:
            continue
        if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value!r}, not a number from 0 on")
    return Probe(**content)
