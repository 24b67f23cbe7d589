"""The first screen: the headline, a row for each graphed cell, and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.report.headline import OUT_OF_MEMORY, gib, over_steps
from analysis.report.report_data import SWEEP, ReportData
from analysis.report.sections.tables import escape, table
from analysis.sweep.cell_results import CellResult, eager_results

HEADER = ("cell", "verdict", "speed-up", "peak GiB, eager to graphed", "replay")
MOST_NAMED = 24
"""The most cells that the legend names."""
GPU_HEADER = (*HEADER[:3], "step ms, eager to graphed", *HEADER[3:])


def render(report: ReportData) -> list[str]:
    eager = eager_results(report.ran)
    graphed = [result for result in report.shown if result.cell.graphed]
    on_gpu = any(result.on_gpu for result in graphed)
    few = _few_steps(graphed)
    rows = [_row(result, eager.get(result.cell.workload_id), on_gpu, few) for result in graphed]
    header = [name + few if name == "verdict" else name for name in (GPU_HEADER if on_gpu else HEADER)]
    return [
        f"# Validation report: {escape(report.sweep.plan.name)}",
        escape(report.summary.headline),
        *([table(header, rows), legend(graphed, eager)] if rows else []),
        *([f"![Speed-ups]({file})" for file in report.plots.get(SWEEP, ())]),
        *(["\n".join(f"- {escape(note)}" for note in report.summary.notes)] if report.summary.notes else []),
    ]


def legend(graphed: Sequence[CellResult], eager: Mapping[str, CellResult]) -> str:
    """Say what each short name stands for. The settings that all cells of a workload share stand behind them, once."""
    workloads = {result.cell.workload_id: "" for result in graphed[:MOST_NAMED]}
    for workload in workloads:
        shared = eager[workload].cell.label.partition(", ")[2] if workload in eager else ""
        cells = [each for each in graphed[:MOST_NAMED] if each.cell.workload_id == workload]
        names = ", ".join(f"{each.name} `{each.cell.label.removesuffix(f', {shared}')}`" for each in cells)
        which = {1: "", 2: "both "}.get(len(cells), "all ")
        workloads[workload] = f"{names}, {which}with {shared}" if shared else names
    rest = ["section Cells names the others"] if len(graphed) > MOST_NAMED else []
    return escape("; ".join([*workloads.values(), *rest])) + "."


def _few_steps(graphed: Sequence[CellResult]) -> str:
    """Return " over 28 steps only" if that holds for several cells and for all, so that the header says it once; else ""."""
    steps = {result.compared_steps: over_steps(result) for result in graphed}
    return next(iter(steps.values())) if len(steps) == 1 < len(graphed) and 0 not in steps else ""


def _row(result: CellResult, eager: CellResult | None, on_gpu: bool, few: str) -> list[str]:
    speed, replay = result.speed.speedup, result.graphs.replay
    times = f"{speed.eager_ms:.4g} to {speed.graphed_ms:.4g}" if speed and result.on_gpu else "-"
    # A CPU replays nothing: compiled code is called.
    proven = "proven" if result.on_gpu else "not applicable"
    proof = (proven if replay.proven else "**not proven**") if replay else "-"
    own_times = [times] if on_gpu else []
    return [result.name, _verdict(result).removesuffix(few), _speedup(result), *own_times, _peaks(result, eager), proof]


def _peaks(result: CellResult, eager: CellResult | None) -> str:
    """Return both peaks. The peak of a phase that ran out of memory is not recorded."""
    before = gib(eager.memory.peak) if eager and eager.memory and eager.memory.whole else "-"
    after = gib(result.memory.peak) if result.memory and result.memory.whole else "-"
    after = "out of memory" if result.outcome == OUT_OF_MEMORY else after
    return "-" if before == after == "-" else f"{before} to {after}"


def _verdict(result: CellResult) -> str:
    """Return the verdict, with how the cell ended if it did not end as expected or has no verdict."""
    if result.verdict is None:
        return f"{result.outcome} (as expected)"
    if not result.passes:
        ended = f" ({result.outcome})" if result.unexpected else ""
        return f"**{result.verdict.verdict}**{ended}"
    return result.verdict.verdict + over_steps(result)


def _speedup(result: CellResult) -> str:
    """Return the speed-up. A cell that does not pass has no speed verdict, however narrow its interval is."""
    speed = result.speed.speedup
    if speed is None:
        return "-"
    interval = f" ({speed.interval})" if speed.interval else ""
    return f"{speed.ratio:.2f}x{interval}{f' {speed.verdict}' if result.passes else ', no verdict'}"
