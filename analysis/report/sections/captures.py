"""What each capture took: graphs, seconds, memory."""

from __future__ import annotations

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import table
from analysis.sweep.cell_results import CellResult
from launch.common.text import size

HEADER = ("cell", "graphs", "capture", "graph pool", "graph launches per step")
NOTE = (
    "Figures are the largest of ranks and repeats. With torch_compile the capture includes the compilation. The graph pool is "
    "the allocator's memory for graphs at the end of phase measure."
)


def render(report: ReportData) -> list[str]:
    """Render the graphed cells on GPUs that captured."""
    rows = [_row(result) for result in report.shown if result.speed.bound and result.graphs.capture_cost]
    return ["## Captures", table(HEADER, rows), NOTE] if rows else []


def _row(result: CellResult) -> list[str]:
    memory, cost, bound = result.memory, result.graphs.capture_cost, result.speed.bound
    measure = memory.of("measure") if memory else None
    return [
        f"`{result.cell.label}`",
        str(cost.graphs) if cost else "-",
        f"{cost.seconds:.2f} s" if cost else "-",
        "-" if measure is None or measure.graph_pool is None else size(measure.graph_pool),
        f"{bound.graphed.graph_launches:g}" if bound and bound.graphed else "-",
    ]
