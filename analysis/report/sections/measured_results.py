"""Each graphed cell against its eager baseline, as people keep such results."""

from __future__ import annotations

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import figure, how_to_read, percent_change, table
from analysis.sweep.cell_results import CellResult
from analysis.sweep.labels import batch_words, layout_words, machine_words, model_words
from launch.common.text import count, size

HEADER = ("cell", "model", "layout, batch", "machine", "step time", "throughput", "loss", "captured",
          "memory before capture", "peak memory", "ended")  # fmt: skip
NOTE = (
    "Each row compares a graphed cell with its eager baseline, eager first. Throughput counts the model's operations per GPU. "
    "Graphs and seconds of a capture are the largest of ranks and repeats; with torch_compile they include the compilation."
)


def render(report: ReportData) -> list[str]:
    baselines = {result.cell.workload_id: result for result in report.ran if not result.cell.graphed}
    rows = [_row(result, baselines.get(result.cell.workload_id)) for result in report.shown if result.cell.graphed]
    return ["## Measured results", table(HEADER, rows), *how_to_read(NOTE)] if rows else []


def _row(result: CellResult, eager: CellResult | None) -> list[str]:
    spec, own, baseline = result.spec, result.memory, eager.memory if eager else None
    step_time, throughput = _speed(result)
    return [
        result.name,
        model_words(spec),
        ", ".join(filter(None, (layout_words(spec.parallelism), batch_words(spec)))),
        machine_words(result),
        step_time,
        throughput,
        _loss(result),
        _captured(result),
        _memory(baseline.before_capture, own.before_capture) if baseline and own else "-",
        _memory(baseline.peak, own.peak) if baseline and own else "-",
        result.outcome,
    ]


def _speed(result: CellResult) -> tuple[str, str]:
    """Return the changes in step time and in throughput."""
    speed = result.speed.speedup
    if speed is None:
        return "-", "-"
    doubt = ", INCONCLUSIVE" if speed.verdict == "INCONCLUSIVE" else ""
    times = rates = ""
    if result.on_gpu:
        times = f" ({speed.eager_ms:.4g} to {speed.graphed_ms:.4g} ms)"
        rates = f" ({speed.eager_tflops:.4g} to {speed.graphed_tflops:.4g} TFLOP/s)" if speed.eager_tflops else ""
    step_time, throughput = percent_change(speed.graphed_ms / speed.eager_ms - 1), percent_change(speed.ratio - 1)
    return f"{step_time}{times}{doubt}", f"{throughput}{rates}{doubt}"


def _loss(result: CellResult) -> str:
    verdict, largest = result.verdict, result.max_loss_difference
    if verdict is None or largest is None:
        return verdict.verdict if verdict else "-"
    apart = f"up to {figure(largest)} apart" if verdict.verdict == "DIVERGED" else f"within {figure(largest)}"
    return f"{verdict.verdict}, {apart} over {count('step', result.compared_steps)}"


def _captured(result: CellResult) -> str:
    cost = result.graphs.capture_cost
    if cost is None or not cost.graphs:
        return "-"
    graphs = f"{count('graph', cost.graphs)} per rank"
    return f"{graphs} in {cost.seconds:.2f} s" if result.on_gpu else graphs


def _memory(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return "-"
    return f"{percent_change(after / before - 1)} ({size(before)} to {size(after)})"
