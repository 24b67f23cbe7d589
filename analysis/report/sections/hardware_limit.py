"""How far each cell on GPUs is from what their hardware can do."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from analysis.limits.roofline import Roofline
from analysis.limits.step_work import KINDS
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import how_to_read, table
from analysis.sweep.cell_results import CellResult
from launch.contract.records.kernels import Kernels

TITLE = "## The hardware's limit"
HEADER = (
    "cell", "step", "limit", "limit / step", *KINDS, "TFLOP per step and GPU", "GB read and written", "measured rates",
)  # fmt: skip
NOTES = (
    "Limit: the time that this GPU needs for the step's work if nothing is late: operations at the rate of a large matrix product, "
    "and bytes at the bandwidth of a large copy. Each kind of work counts with the longer of its two "
    "times, and the limit is the sum over the kinds. Slow kernels lengthen the GPU-busy time of the upper bound, but not this "
    "limit (docs/limits.md).",
    "Limit / step: the share of the step that the hardware needs. Faster kernels and less waiting can save at most the rest, "
    "unless different kinds of work overlap.",
    "Dense to optimizer: the part of each kind of work in the limit. Dense: matrix products of linear layers. Grouped: those of "
    "experts. Logits: that of the output layer. Elementwise: norms, residual additions, activations, dispatch and loss.",
    "Work: that of the rank with the longest limit, counted from the recipe with an even load of experts. "
    "Communication and the bubble of a pipeline take no time in the limit.",
    "Measured rates: each rank measures its GPU after its last step, in a short burst. The best of all ranks and runs counts. "
    "Under a power cap, a long step cannot hold these rates.",
)


def render(report: ReportData) -> list[str]:
    """Render the cells on GPUs whose runs ended well. Say what is missing if no run measured rates."""
    cells = [(result, result.speed.roofline) for result in report.shown if result.speed.roofline]
    if not cells:
        return []
    if not any(roofline.rates for _, roofline in cells):
        reasons = dict.fromkeys(roofline.reason for _, roofline in cells)
        return [TITLE, f"Unknown: {'; '.join(reasons)}.", *_kernel_tables(cells)]
    return [TITLE, table(HEADER, [_row(*cell) for cell in cells]), *how_to_read(*NOTES), *_kernel_tables(cells)]


def _kernel_tables(cells: Sequence[tuple[CellResult, Roofline]]) -> list[str]:
    """Render the kernels of the fastest cell of each task that has a record of them, without graphs that may be wrong."""
    fastest: dict[str, tuple[float, str, Kernels]] = {}
    for result, roofline in cells:
        if result.cell.graphed and not result.passes:
            continue
        if roofline.kernels and roofline.kernels.longest and (step := result.speed.step_time):
            found = (step.milliseconds, result.name, roofline.kernels)
            fastest[result.cell.task_id] = min(fastest.get(result.cell.task_id, found), found, key=itemgetter(0))
    return [block for found in fastest.values() for block in _kernel_table(*found)]


def _kernel_table(step_ms: float, name: str, kernels: Kernels) -> list[str]:
    rows = [
        (f"`{one.name}`", f"{one.count:g}", f"{one.milliseconds:.2f} ms", f"{one.milliseconds / step_ms:.0%}")
        for one in kernels.longest
    ]
    said = f"These kernels take the most time in a step of {name}, on rank 0. The step has {kernels.number:,.0f} kernels in all."
    if len({one.name for one in kernels.longest}) < len(kernels.longest):
        said += " Long names are cut, so different kernels show the same beginning."
    return [said, table(("kernel", "per step", "time", "of the step"), rows)]


def _row(result: CellResult, roofline: Roofline) -> list[str]:
    step, share, limit, rates = result.speed.step_time, result.speed.of_hardware, roofline.limit_ms, roofline.rates
    return [
        result.name_with_verdict,
        f"{step.milliseconds:.2f} ms" if step else "-",
        "-" if limit is None else f"{limit:.2f} ms",
        "-" if share is None else f"{share:.0%}",
        *(_time(roofline.milliseconds.get(kind)) for kind in KINDS),
        f"{sum(work.operations for work in roofline.work.values()) / 1e12:.3g}",
        f"{sum(work.bytes for work in roofline.work.values()) / 1e9:.3g}",
        f"{rates.flops / 1e12:.0f} TFLOP/s in {rates.precision}, {rates.bandwidth / 1e12:.2f} TB/s"
        if rates
        else f"unknown: {roofline.reason}",
    ]


def _time(milliseconds: float | None) -> str:
    return f"{milliseconds:.2f} ms" if milliseconds else "-"
