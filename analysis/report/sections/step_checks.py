"""Step checks: single steps computed by replay and by the same code uncaptured."""

from __future__ import annotations

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import how_to_read, table
from analysis.sweep.cell_results import CellResult
from launch.contract.records.step_check import NOISE_MULTIPLE, SMALL_DIFFERENCE, SMALL_NOISE_MULTIPLE

HEADER = ("cell", "steps", "runs", "results per rank", "results with other bits", "largest difference, times the noise", "tokens elsewhere",
          "longest check", "finding")  # fmt: skip
NOTES = (
    "Each checked step is computed twice from one state: by replay, and by the same code uncaptured (docs/step_check.md).",
    "Noise: how far a result changes in a second uncaptured pass, or when the first layer's output moves by one unit in the last "
    "place. The noise of a result is the larger of these two changes.",
    f"Rounding explains a difference of up to {NOISE_MULTIPLE:g} times the noise, or {SMALL_NOISE_MULTIPLE:g} times if it is below "
    f"{SMALL_DIFFERENCE:.2%} of the result. A larger one is a fault.",
    "Tokens elsewhere: tokens that a router sends to another expert.",
)


def render(report: ReportData) -> list[str]:
    rows = [row for result in report.shown if (row := _row(result))]
    return ["## Step checks", table(HEADER, rows), *how_to_read(*NOTES)] if rows else []


def _row(result: CellResult) -> list[str]:
    checks = result.graphs.step_checks
    if checks is None:
        return []
    none = "none beyond noise" + ("; each check compared a share of the optimizer" if checks.left_out else "")
    finding = f"**{checks.fault}**" if checks.fault else checks.undecided or none
    most = "-" if checks.most is None else f"{checks.most:.2g}"
    compared = [str(checks.unequal), most, str(checks.moved_tokens), f"{checks.seconds:.1f} s"]
    # A check that compared nothing found no difference either, but a 0 would claim so.
    figures = [str(checks.tensors), *compared] if checks.tensors or checks.unequal else ["0", *["-"] * len(compared)]
    return [result.name, ", ".join(map(str, checks.steps)), str(checks.runs), *figures, finding]
