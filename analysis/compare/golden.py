"""The figures of report.json that a comparison reads.

A golden file is a smaller report.json that can be committed. The same function reads both. It refuses an unknown key in a
golden file and ignores those of a report, which has many more.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from analysis.report.json_report import FORMAT, report_to_json, to_json
from analysis.report.report_data import report_data
from analysis.sweep.judge_sweep import judge_sweep
from analysis.verdict.verdict import VerdictName
from launch.common.atomic_files import RecordError, encode, iter_json_object
from launch.common.typed_json import from_json
from launch.contract.outcomes import RESULTS_INTACT, Expectation
from launch.contract.paths import SweepPaths
from launch.contract.plan import CellState
from launch.contract.spec import CudaGraph

_ROUNDING = 1e-9
_ONLY_IN_REPORTS = "recipe_file"
"""A key of report.json that no golden file has."""


@dataclass(frozen=True)
class GoldenDeviation:
    """The metric that DIVERGED. ``size`` is the difference at the first step that deviates.

    It is in nats for the loss, and relative to eager for the gradient norm.
    """

    metric: str
    size: float


@dataclass(frozen=True)
class GoldenVerdict:
    verdict: VerdictName
    reason: str
    deviation: GoldenDeviation | None


@dataclass(frozen=True)
class GoldenMemory:
    """``peak`` in bytes, the largest over phases, ranks and repeats."""

    kind: str
    peak: float


@dataclass(frozen=True)
class GoldenSpeed:
    """The ratio of step times, eager over graphed, and the cell's own interval, which no other cell widens.

    The bounds are None if there are too few pairs, or for another ``reason``.
    """

    ratio: float
    own_low: float | None
    own_high: float | None
    pairs: int
    reason: str

    @property
    def interval(self) -> tuple[float, float] | None:
        return (
            None if self.own_low is None or self.own_high is None or self.pairs < 2 else (self.own_low, self.own_high)
        )


@dataclass(frozen=True)
class GoldenCell:
    """A cell that a sweep runs."""

    cell_id: str
    label: str
    outcome: str
    expect: Expectation
    unexpected: bool
    unsound_records: tuple[str, ...]
    unfinished: bool
    verdict: GoldenVerdict | None
    memory: GoldenMemory | None
    speed: GoldenSpeed | None
    max_loss_difference: float | None
    seconds: float = 0.0
    """How long the attempts that count ran, all repeats together."""

    @property
    def graphed(self) -> bool:
        """Whether the cell captures anything, from the beginning of its id (launch.contract.spec.RunSpec.cell_id)."""
        return not self.cell_id.startswith(f"{CudaGraph().label}-")


@dataclass(frozen=True)
class GoldenReason:
    rule: str


@dataclass(frozen=True)
class GoldenNotRun:
    """A cell that was rejected or cannot run, and the rules that say so."""

    cell_id: str
    label: str
    state: CellState
    reasons: tuple[GoldenReason, ...]

    @property
    def rules(self) -> str:
        return ", ".join(reason.rule for reason in self.reasons)


@dataclass(frozen=True)
class GoldenSummary:
    """``unvalidated`` says which graphed cells could not run; it is empty if none is missing."""

    unvalidated: str = ""


@dataclass(frozen=True)
class GoldenFailure:
    """One kind of failure (analysis.sweep.failure_modes), with the labels of its cells."""

    message: str
    fix: str
    graphed: tuple[str, ...]
    eager: tuple[str, ...]


@dataclass(frozen=True)
class Golden:
    """A sweep as its report describes it.

    ``provenance`` maps each key of the environment to the values that runs had, with the number of runs for each.
    """

    sweep: str
    cells: tuple[GoldenCell, ...]
    not_run: tuple[GoldenNotRun, ...]
    provenance: Mapping[str, tuple[tuple[str, int], ...]]
    recipe: str
    summary: GoldenSummary = GoldenSummary()
    failure_modes: tuple[GoldenFailure, ...] = ()


def golden_of(sweep: SweepPaths) -> Golden:
    """Return what a report of ``sweep`` would say now, from its records and by today's rules. Write nothing.

    Raises:
        FileNotFoundError: the folder holds no plan.
        RecordError: its plan is damaged or of another version.
    """
    report = report_to_json(report_data(judge_sweep(sweep)))
    return _parse(json.loads("".join(iter_json_object(report))))


def read_golden(content: Any) -> Golden:
    """Return the figures in ``content``, which is that of a report.json or of a golden file.

    Raises:
        RecordError: it is neither, is of another version, or holds what no report can say. The message names each such entry.
    """
    golden = _parse(content)
    problems = [
        *_duplicates(golden),
        *(f"{cell.cell_id}: {said}" for cell in golden.cells for said in _impossible(cell)),
    ]
    if problems:
        raise RecordError(f"{'; '.join(problems)}: no report can contain this")
    return golden


def _duplicates(golden: Golden) -> Iterator[str]:
    counts = Counter([*(cell.cell_id for cell in golden.cells), *(cell.cell_id for cell in golden.not_run)])
    return (f"{cell_id}: the cell appears {count} times" for cell_id, count in counts.items() if count > 1)


def _impossible(cell: GoldenCell) -> Iterator[str]:
    """Yield each entry of ``cell`` that no report can contain, and that would hide a regression."""
    failed_as_expected = cell.outcome == cell.expect.outcome and cell.outcome not in RESULTS_INTACT
    if cell.graphed and cell.verdict is None and not (failed_as_expected or cell.outcome == "NOT RUN"):
        yield f"verdict is null for a graphed cell that ended {cell.outcome}, expected {cell.expect.text}"
    if cell.memory and not math.isfinite(cell.memory.peak):
        yield f"memory.peak is {cell.memory.peak}, not a number of bytes"
    if cell.speed:
        yield from _unbounded(cell.speed)
        figures = {name: getattr(cell.speed, name) for name in ("ratio", "own_low", "own_high")}
        yield from (f"speed.{name} is {x}, not a positive finite number" for name, x in figures.items() if x is not None and not 0 < x < math.inf)  # fmt: skip
        if cell.speed.interval and not _contains(cell.speed.interval, cell.speed.ratio):
            low, high = cell.speed.interval
            yield f"speed.ratio {cell.speed.ratio} is not from speed.own_low {low} to speed.own_high {high}"


def _unbounded(speed: GoldenSpeed) -> Iterator[str]:
    """Yield why the bounds are not an interval."""
    low, high = speed.own_low, speed.own_high
    if speed.pairs < 1:
        yield f"speed.pairs is {speed.pairs}, not a number of pairs"
    elif speed.pairs == 1 and {low, high} != {None}:
        yield f"speed is from {low} to {high} of one pair, which has no interval"
    if (low is None) != (high is None):
        yield f"speed.own_low is {low} and speed.own_high {high}: an interval has both"


def _contains(interval: tuple[float, float], ratio: float) -> bool:
    """Return whether ``ratio`` lies in ``interval``, within rounding."""
    return interval[0] <= ratio * (1 + _ROUNDING) and ratio <= interval[1] * (1 + _ROUNDING)


def _parse(content: Any) -> Golden:
    """Return the figures in ``content``, but accept figures that are not finite: they count as worse."""
    try:
        if content["format"] != FORMAT:
            raise RecordError(
                f"its format is {content['format']}; this version reads format {FORMAT} only; write it again"
            )
        rest = {key: value for key, value in content.items() if key != "format"}
        return from_json(Golden, _pick(Golden, rest) if _ONLY_IN_REPORTS in rest else rest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"neither a report.json nor a golden file ({type(error).__name__}: {error})") from error


def _pick(kind: Any, value: Any) -> Any:
    """Return the fields of ``value``, a part of report.json, that a golden file has.

    Fields with a default are newer than some reports.
    """
    parts = get_args(kind)
    if is_dataclass(kind) and isinstance(value, Mapping):
        defaults = {one.name: encode(one.default) for one in fields(kind) if one.default is not MISSING}
        present = (defaults | dict(value)).items()
        kinds = get_type_hints(kind)
        return {name: _pick(kinds[name], item) for name, item in present if name in kinds}
    if NoneType in parts:
        return _pick(parts[0], value)
    return [_pick(parts[0], item) for item in value] if parts[-1:] == (...,) and isinstance(value, list) else value


def golden_to_json(golden: Golden) -> dict[str, Any]:
    """Return the content of a golden file: of report.json, only what :func:`read_golden` reads."""
    return {"format": FORMAT, **to_json(golden)}
