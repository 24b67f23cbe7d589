"""The figures of report.json that a comparison reads.

A golden file is a smaller report.json that can be committed. The same function reads both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from analysis.report.json_report import FORMAT, report_to_json, to_json
from analysis.report.report_data import report_data
from analysis.sweep.judge_sweep import judge_sweep
from analysis.verdict.verdict import VERDICTS, VerdictName
from launch.common.atomic_files import RecordError, number
from launch.contract.outcomes import RESULTS_INTACT
from launch.contract.paths import SweepPaths
from launch.contract.plan import CellState
from launch.contract.spec import CudaGraph

_ROUNDING = 1e-9


@dataclass(frozen=True)
class GoldenDeviation:
    """``size`` is of the step at which it began; nats of the loss, of the gradient norm relative to eager's."""

    metric: str
    size: float


@dataclass(frozen=True)
class GoldenVerdict:
    verdict: VerdictName
    reason: str
    deviation: GoldenDeviation | None = None


@dataclass(frozen=True)
class GoldenMemory:
    """``peak`` in bytes, the largest over phases, ranks and repeats."""

    kind: str
    peak: float


@dataclass(frozen=True)
class GoldenSpeed:
    """The ratio of step times, eager over graphed, and the cell's own interval, which no other cell widens.

    The bounds are None with too few pairs, or for a ``reason``.
    """

    ratio: float
    low: float | None
    high: float | None
    pairs: int
    reason: str = ""
    """Why there is no interval."""

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None or self.pairs < 2 else (self.low, self.high)


@dataclass(frozen=True)
class GoldenCell:
    """A cell to run. ``expected`` is an outcome, or one with its phase: "CUDA_OOM in capture"."""

    cell_id: str
    label: str
    outcome: str
    expected: str
    unexpected: bool
    unsound_records: tuple[str, ...]
    unfinished: bool
    verdict: GoldenVerdict | None
    memory: GoldenMemory | None
    speed: GoldenSpeed | None
    max_loss_difference: float | None = None

    @property
    def graphed(self) -> bool:
        """Whether it captures anything: its id begins with that (launch.contract.spec.RunSpec.cell_id)."""
        return not self.cell_id.startswith(f"{CudaGraph().label}-")


@dataclass(frozen=True)
class GoldenNotRun:
    """A cell that was rejected or cannot run, and the rules that say so."""

    cell_id: str
    label: str
    state: CellState
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Golden:
    """A sweep as its report tells it. ``provenance`` has for each key of the environment the values that runs had, and
    how many runs had each."""

    sweep: str
    cells: tuple[GoldenCell, ...]
    not_run: tuple[GoldenNotRun, ...]
    provenance: Mapping[str, tuple[tuple[str, int], ...]]
    recipe: str


def golden_of(sweep: SweepPaths) -> Golden:
    """What a report of ``sweep`` says now, from its records and by today's rules. Nothing is written.

    Raises:
        FileNotFoundError: the folder holds no plan.
        RecordError: its plan is not JSON.
    """
    return _parsed(report_to_json(report_data(judge_sweep(sweep))))


def read_golden(content: Any) -> Golden:
    """From the content of report.json or of a golden file.

    Raises:
        RecordError: it is neither, of another version, or holds what no report can say, each named.
    """
    golden = _parsed(content)
    problems = [
        *_duplicates(golden),
        *(f"{cell.cell_id}: {said}" for cell in golden.cells for said in _impossible(cell)),
    ]
    if problems:
        raise RecordError(f"{'; '.join(problems)}: no report says so")
    return golden


def _duplicates(golden: Golden) -> Iterator[str]:
    counts = Counter([*(cell.cell_id for cell in golden.cells), *(cell.cell_id for cell in golden.not_run)])
    return (f"{cell_id}: the cell is there {count} times" for cell_id, count in counts.items() if count > 1)


def _impossible(cell: GoldenCell) -> Iterator[str]:
    """Yield what no report can say, and what would hide a regression."""
    failed_as_expected = cell.outcome == cell.expected.partition(" in ")[0] and cell.outcome not in RESULTS_INTACT
    if cell.graphed and cell.verdict is None and not (failed_as_expected or cell.outcome == "NOT RUN"):
        yield f"verdict is null of a graphed cell that ended {cell.outcome}, expected {cell.expected}"
    if cell.memory and not math.isfinite(cell.memory.peak):
        yield f"memory.peak is {cell.memory.peak}, not a number of bytes"
    if cell.speed:
        yield from _unbounded(cell.speed)
        figures = {name: getattr(cell.speed, name) for name in ("ratio", "low", "high")}
        yield from (f"speed.{name} is {x}, not a positive finite number" for name, x in figures.items() if x is not None and not 0 < x < math.inf)  # fmt: skip
        if cell.speed.interval and not _contains(cell.speed.interval, cell.speed.ratio):
            yield f"speed.ratio {cell.speed.ratio} is not from speed.low {cell.speed.low} to speed.high {cell.speed.high}"


def _unbounded(speed: GoldenSpeed) -> Iterator[str]:
    """Yield bounds that are no interval. Older reports gave one pair its ratio as both bounds, which is allowed."""
    if speed.pairs < 1:
        yield f"speed.pairs is {speed.pairs}, not a number of pairs"
    elif speed.pairs == 1 and not {speed.low, speed.high} <= {None, speed.ratio}:
        yield f"speed is from {speed.low} to {speed.high} of one pair, which has no interval"
    if (speed.low is None) != (speed.high is None):
        yield f"speed.low is {speed.low} and speed.high {speed.high}: an interval has both"


def _contains(interval: tuple[float, float], ratio: float) -> bool:
    """Return whether ``ratio`` lies in ``interval``, within rounding."""
    return interval[0] <= ratio * (1 + _ROUNDING) and ratio <= interval[1] * (1 + _ROUNDING)


def _parsed(content: Any) -> Golden:
    """As :func:`read_golden`, of what this version wrote itself: a figure that is not finite is one that got worse."""
    try:
        if content["format"] != FORMAT:
            raise RecordError(
                f"its format is {content['format']}; this version reads format {FORMAT} only: write it anew"
            )
        return Golden(
            str(content["sweep"]),
            tuple(_cell(cell) for cell in content["cells"]),
            tuple(_not_run(cell) for cell in content["not_run"]),
            {
                key: tuple((str(value), int(runs)) for value, runs in values)
                for key, values in content["provenance"].items()
            },
            str(content["recipe"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"neither a report.json nor a golden file ({type(error).__name__}: {error})") from error


def golden_to_json(golden: Golden) -> dict[str, Any]:
    """The content of a golden file: report.json's keys, and of each only what :func:`read_golden` reads."""
    return {
        "format": FORMAT,
        "sweep": golden.sweep,
        "cells": [_cell_to_json(cell) for cell in golden.cells],
        "not_run": [
            {"cell_id": cell.cell_id, "label": cell.label, "state": cell.state}
            | {"reasons": [{"rule": rule} for rule in cell.rules]}
            for cell in golden.not_run
        ],
        "provenance": dict(golden.provenance),
        "recipe": golden.recipe,
    }


def _cell_to_json(cell: GoldenCell) -> dict[str, Any]:
    content = to_json(cell)
    outcome, _, phase = content.pop("expected").partition(" in ")
    return {**content, "expect": {"outcome": outcome, "phase": phase or None}}


def _cell(content: Mapping[str, Any]) -> GoldenCell:
    expect = content["expect"]
    return GoldenCell(
        cell_id=str(content["cell_id"]),
        label=str(content["label"]),
        outcome=str(content["outcome"]),
        expected=f"{expect['outcome']} in {expect['phase']}" if expect["phase"] else str(expect["outcome"]),
        unexpected=_flag(content["unexpected"]),
        unsound_records=tuple(map(str, content["unsound_records"])),
        unfinished=_flag(content["unfinished"]),
        verdict=_verdict(content["verdict"]),
        memory=_memory(content["memory"]),
        speed=_speed(content["speed"]),
        max_loss_difference=_optional_number(content.get("max_loss_difference")),
    )


def _optional_number(value: float | str | None) -> float | None:
    return None if value is None else number(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _verdict(content: Mapping[str, Any] | None) -> GoldenVerdict | None:
    if content is None:
        return None
    if content["verdict"] not in VERDICTS:
        raise ValueError(f"{content['verdict']!r} is no verdict")
    found = content.get("deviation")
    deviation = found and GoldenDeviation(str(found["metric"]), number(found["size"]))
    return GoldenVerdict(cast(VerdictName, content["verdict"]), str(content["reason"]), deviation)


def _memory(content: Mapping[str, Any] | None) -> GoldenMemory | None:
    return None if content is None else GoldenMemory(str(content["kind"]), number(content["peak"]))


def _speed(content: Mapping[str, Any] | None) -> GoldenSpeed | None:
    if content is None:
        return None
    bounds = ("own_low", "own_high") if "own_low" in content else ("low", "high")  # a golden file has no others
    low, high = (_optional_number(content[bound]) for bound in bounds)
    reason = str(content.get("reason", "")) if low is None and high is None else ""
    return GoldenSpeed(number(content["ratio"]), low, high, int(content["pairs"]), reason)


def _not_run(content: Mapping[str, Any]) -> GoldenNotRun:
    state: Literal["rejected", "not_runnable"] = "rejected" if content["state"] == "rejected" else "not_runnable"
    rules = tuple(str(reason["rule"]) for reason in content["reasons"])
    return GoldenNotRun(str(content["cell_id"]), str(content["label"]), state, rules)
