"""The three tables that a person keeps: what was measured, what to expect of graphs, and what goes wrong."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.report.sections.tables import figure, table
from analysis.speed.speedup import Speed
from analysis.sweep.cell_results import CellResult
from analysis.sweep.failure_modes import FailureMode, failure_modes
from analysis.sweep.labels import batch_words, layout_words, machine_words, model_words, precision_words
from analysis.sweep.metric_changes import MEMORY_METRICS, Change, MemoryRisk, MetricChange, memory_risks, metric_changes
from launch.common.text import count, size

NAMED = 3
LONGEST_MESSAGE = 240
UNCHANGED = 0.01
"""Relative changes below it are no change."""


# --- what was measured ----------------------------------------------------------------------------------------------


def measured(results: Sequence[CellResult], shown: Sequence[CellResult]) -> list[str]:
    """The graphed cells ``shown``, beside their eager twins among ``results``."""
    twins = {r.cell.workload_id: r for r in results if r.cell.state == "run" and not r.cell.graphed}
    rows = [_measured_row(result, twins.get(result.cell.workload_id)) for result in shown if result.cell.graphed]
    header = ("cell", "model", "layout, batch", "machine", "step time", "throughput", "loss", "captured",
              "memory before capture", "peak memory", "ended")  # fmt: skip
    how = "Each graphed cell against its eager twin, eager first; throughput is the model's operations a GPU."
    return ["## Measured results", table(header, rows), how] if rows else []


def _measured_row(result: CellResult, twin: CellResult | None) -> list[str]:
    spec = result.spec
    return [
        f"`{result.cell.label}`",
        model_words(spec.model),
        ", ".join(filter(None, (layout_words(spec.parallelism), batch_words(spec)))),
        machine_words(result),
        _step_time(result),
        _throughput(result),
        _loss(result),
        _captured(result),
        _before_capture(result, twin),
        _peaks(result, twin),
        result.outcome,
    ]


def _step_time(result: CellResult) -> str:
    speed = result.speed.speedup
    if speed is None:
        return "-"
    absolute = f" ({speed.eager_ms:.4g} to {speed.graphed_ms:.4g} ms)" if result.on_gpu else ""
    return _percent(speed.graphed_ms / speed.eager_ms - 1) + absolute + _unsure(speed)


def _throughput(result: CellResult) -> str:
    speed = result.speed.speedup
    if speed is None:
        return "-"
    absolute = f" ({speed.eager_tflops:.4g} to {speed.graphed_tflops:.4g} TFLOP/s)" if result.on_gpu else ""
    return _percent(speed.ratio - 1) + absolute + _unsure(speed)


def _unsure(speed: Speed) -> str:
    return ", INCONCLUSIVE" if speed.word == "INCONCLUSIVE" else ""


def _loss(result: CellResult) -> str:
    if result.verdict is None:
        return "-"
    steps = min((pair.verdict.evidence.steps for pair in result.pairs if pair.verdict.evidence), default=0)
    within = result.max_loss_difference
    if within is None:
        return result.verdict.word
    apart = f"up to {figure(within)} apart" if result.verdict.word == "DIVERGED" else f"within {figure(within)}"
    return f"{result.verdict.word}, {apart} over {steps} steps"


def _captured(result: CellResult) -> str:
    cost = result.graphs.capture_cost
    if cost is None or not cost.graphs:
        return "-"
    graphs = f"{count('graph', cost.graphs)} a rank"
    return f"{graphs} in {cost.seconds:.2f} s" if result.on_gpu else graphs


def _before_capture(result: CellResult, twin: CellResult | None) -> str:
    before = twin.memory.before_capture if twin and twin.memory else None
    return _memory(before, result.memory.before_capture if result.memory else None)


def _peaks(result: CellResult, twin: CellResult | None) -> str:
    before = twin.memory.peak if twin and twin.memory else None
    return _memory(before, result.memory.peak if result.memory else None)


def _memory(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return "-"
    return f"{_percent(after / before - 1)} ({size(before)} to {size(after)})"


def _percent(change: float) -> str:
    if abs(change) < UNCHANGED:
        return "unchanged"
    return f"{abs(change):.0%} {'down' if change < 0 else 'up'}"


# --- what to expect -------------------------------------------------------------------------------------------------


def expected_changes(results: Sequence[CellResult]) -> list[str]:
    conditions = {r.cell.label: _conditions(r) for r in results if r.cell.graphed and r.cell.state == "run"}
    on_gpu = any(result.on_gpu for result in results)
    found = [change for change in metric_changes(results) if on_gpu or change.metric != "model TFLOP/s a GPU"]
    rows = [_change_row(change, conditions, on_gpu) for change in found]
    rows += [_risk_row(risk) for risk in memory_risks(results)] if on_gpu else []
    how = (
        "From eager to graphed, over the cells whose loss passes or is inconclusive; a change below "
        f"{UNCHANGED:.0%} is none."
    )
    header = ("metric", "graphs", "change", "conditions", "measured")
    return ["## Expected metric changes", table(header, rows), how] if rows else []


def _conditions(result: CellResult) -> str:
    spec = result.spec
    parts = (
        model_words(spec.model),
        layout_words(spec.parallelism),
        precision_words(spec.training),
        machine_words(result),
    )
    return ", ".join(filter(None, parts))


def _change_row(change: MetricChange, conditions: dict[str, str], on_gpu: bool) -> list[str]:
    held = list(dict.fromkeys(conditions[each.label] for each in change.changes))
    return [
        change.metric,
        f"`{change.graphs}`",
        _range(*change.span) if change.span else "not told: the speed is INCONCLUSIVE",
        _some(held),
        _some([_evidence(change, each, on_gpu) for each in change.changes]),
    ]


def _range(least: float, most: float) -> str:
    low, high = _percent(least), _percent(most)
    if low == high:
        return low
    if (least < 0) == (most < 0) and "unchanged" not in (low, high):
        small, large = sorted((abs(least), abs(most)))
        return f"{small:.0%} to {large:.0%} {'down' if least < 0 else 'up'}"
    return f"{low} to {high}"


def _evidence(change: MetricChange, each: Change, on_gpu: bool) -> str:
    if change.metric in MEMORY_METRICS:
        return f"{size(round(each.eager))} to {size(round(each.graphed))}"
    unit = "ms" if change.metric == "step time" else "TFLOP/s"
    said = f"{each.eager:.4g} to {each.graphed:.4g} {unit}" if on_gpu else _percent(each.relative)
    return said if each.sure else f"{said} (INCONCLUSIVE)"


def _some(texts: Sequence[str]) -> str:
    rest = f"; and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return "; ".join(texts[:NAMED]) + rest


def _risk_row(risk: MemoryRisk) -> list[str]:
    change = f"{len(risk.out_of_memory) or 'none'} of {count('cell', risk.fitting)} out of memory"
    return ["out of memory", f"`{risk.graphs}`", change, "the eager twin fits", _some(risk.out_of_memory)]


# --- what goes wrong ------------------------------------------------------------------------------------------------


def failures_by_kind(results: Sequence[CellResult]) -> list[str]:
    modes = failure_modes(results)
    header = ("what", "ended", "cells", "eager twins", "says", "way out")
    return ["## Failure modes", table(header, map(_mode_row, modes))] if modes else []


def _mode_row(mode: FailureMode) -> list[str]:
    message = " ".join(mode.message.split())
    return [
        mode.name,
        mode.ending,
        _labels((*mode.graphed, *mode.eager)),
        _eager(mode),
        message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + "...",
        mode.remedy,
    ]


def _labels(labels: Sequence[str]) -> str:
    return f"{len(labels)}: " + _some([f"`{label}`" for label in labels])


def _eager(mode: FailureMode) -> str:
    if mode.eager:
        return "fail in the same way: it is no matter of graphs"
    return "do not" if "rejected" not in mode.ending else "-"
