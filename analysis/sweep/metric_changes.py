"""Measure how each graph configuration changes each metric, relative to the eager baseline.

A graphed cell counts only if it has a speed-up, and a verdict that passes or is INCONCLUSIVE: a cell with wrong results is no
evidence. Out-of-memory errors count over all graphed cells that ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from analysis.sweep.cell_results import CellResult, eager_results
from analysis.sweep.memory_fit import AT_CAPTURE, AT_REPLAY, BEFORE, FITS, state_of
from launch.common.grouped import grouped

MEMORY_METRICS = ("memory before capture", "peak memory")
OUT_OF_MEMORY = (BEFORE, AT_CAPTURE, AT_REPLAY)
ChangedMetric = Literal["step time", "model TFLOP/s/GPU", "memory before capture", "peak memory"]


@dataclass(frozen=True)
class CellChange:
    """The values of a metric in one cell, eager and graphed: ms per step, TFLOP/s per GPU, or bytes.

    ``sure`` is False if the metric is a speed, and the verdict on speed or on losses is INCONCLUSIVE.
    """

    label: str
    eager: float
    graphed: float
    sure: bool = True

    @property
    def relative(self) -> float:
        return self.graphed / self.eager - 1


@dataclass(frozen=True)
class MetricChange:
    """The changes of ``metric`` in the cells of one graph configuration, at least one."""

    metric: ChangedMetric
    graphs: str
    changes: tuple[CellChange, ...]

    @property
    def span(self) -> tuple[float, float] | None:
        """The smallest and the largest relative change among sure ones; None if there is none."""
        sure = [change.relative for change in self.changes if change.sure]
        return (min(sure), max(sure)) if sure else None


@dataclass(frozen=True)
class MemoryRisk:
    """The number of cells of one graph configuration whose eager baseline fits, and those that ran out of memory."""

    graphs: str
    fitting: int
    out_of_memory: tuple[str, ...]


def metric_changes(results: Sequence[CellResult]) -> tuple[MetricChange, ...]:
    """Return the changes by metric, then by graph configuration in the plan's order."""
    baselines = eager_results(results)
    changes = grouped(
        ((metric, result.spec.cuda_graph.label), change)
        for result in results
        if result.cell.workload_id in baselines and _is_evidence(result)
        for metric, change in _changes(baselines[result.cell.workload_id], result).items()
    )
    by_metric = sorted(changes.items(), key=lambda item: get_args(ChangedMetric).index(item[0][0]))
    return tuple(MetricChange(metric, graphs, tuple(cells)) for (metric, graphs), cells in by_metric)


def memory_risks(results: Sequence[CellResult]) -> tuple[MemoryRisk, ...]:
    """Return the risk of running out of memory by graph configuration, in the plan's order."""
    baselines = eager_results(results)
    fitting: dict[str, list[CellResult]] = {}
    for result in results:
        baseline = baselines.get(result.cell.workload_id)
        ended = result.cell.state == "run" and not (result.unfinished or result.spec.made_elsewhere)
        if result.cell.graphed and ended and baseline is not None and state_of(baseline) == FITS:
            fitting.setdefault(result.spec.cuda_graph.label, []).append(result)
    return tuple(
        MemoryRisk(graphs, len(cells), tuple(c.cell.label for c in cells if state_of(c) in OUT_OF_MEMORY))
        for graphs, cells in fitting.items()
    )


def _is_evidence(result: CellResult) -> bool:
    verdict = result.verdict
    return (
        verdict is not None
        and (verdict.passes or verdict.verdict == "INCONCLUSIVE")
        and result.speed.speedup is not None
    )


def _changes(eager: CellResult, graphed: CellResult) -> dict[ChangedMetric, CellChange]:
    speed, label = graphed.speed.speedup, graphed.cell.label
    values: dict[ChangedMetric, tuple[float | None, float | None]] = {}
    if speed is not None:
        values["step time"] = speed.eager_ms, speed.graphed_ms
        values["model TFLOP/s/GPU"] = speed.eager_tflops, speed.graphed_tflops
    if eager.memory is not None and graphed.memory is not None:
        before, after = eager.memory.before_capture, graphed.memory.before_capture
        if before.keys() == after.keys():
            values["memory before capture"] = max(before.values(), default=None), max(after.values(), default=None)
        values["peak memory"] = eager.memory.peak, graphed.memory.peak
    sure = graphed.passes and speed is not None and speed.verdict != "INCONCLUSIVE"
    return {
        metric: CellChange(label, before, after, sure or metric in MEMORY_METRICS)
        for metric, (before, after) in values.items()
        if before and after is not None
    }
