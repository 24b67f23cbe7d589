"""The rungs of analysis.verdict.ladder for every graphed cell that was judged by its curves: why a verdict is what it
is."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.records.steps import Metric
from analysis.report.sections.tables import figure, table
from analysis.sweep.cell_results import CellResult
from analysis.verdict.curve_difference import METRIC_NAMES, METRICS, Estimate, Evidence

_HOW = (
    "Gradient norms are relative to eager's. The floor is how far an eager run is from the mean of the others at most, the "
    "largest difference how far a graphed run is from the mean of the eager ones. The mean difference has its interval, "
    "and p, how likely one so small is if the truth is at the margin; drift is how far the line fitted to the differences "
    "rises over the window, and late whether the last tenth of the steps blows up (docs/verdicts.md). Runs are judged "
    "together with those of the same code, libraries and data alone."
)


def ladder(ran: Sequence[CellResult]) -> list[str]:
    judged = [(result, result.verdict.evidence) for result in ran if result.verdict and result.verdict.evidence]
    if not judged:
        return []
    header = ("cell", "verdict", "runs, eager / graphed", "metric", "equal to the bit", "floor", "largest difference",
              "mean difference", "drift", "late")  # fmt: skip
    rows = [_row(result, found, metric) for result, found in judged for metric in METRICS]
    return ["### Loss, rung by rung", table(header, rows), _HOW]


def _row(result: CellResult, found: Evidence, metric: Metric) -> list[str]:
    size, step = found.largest(metric)
    tested = next((one for one in found.tested if one.metric == metric), None)
    shown = ["-"] * 3
    if tested:
        mean = f"{_estimate(tested.mean)} (p {tested.p:.1g})"
        shown = [mean, _estimate(tested.rise) + " (leaves)" * tested.leaves, "blow-up" if tested.late else "no"]
    return [
        f"`{result.cell.label}`",
        result.verdict.word if result.verdict else "",
        f"{found.eager_runs} / {found.graphed_runs}{_of(found.graphed_runs, len(result.runs))}",
        METRIC_NAMES[metric],
        prefix(found),
        figure(found.floor.of(metric)) if found.floor else "unknown",
        f"{figure(size)} at {step}",
        *shown,
    ]


def _of(judged: int, runs: int) -> str:
    return f" of {runs} each" if judged < runs else ""


def prefix(found: Evidence) -> str:
    """How far graphed runs equal eager ones, and eager ones each other where they do not."""
    own = f"; eager runs among themselves {found.eager_prefix}" if found.eager_prefix < found.steps else ""
    return f"first {found.bitwise_prefix} of {found.steps} steps{own}"


def _estimate(estimate: Estimate) -> str:
    return f"{figure(estimate.value)} +- {figure(estimate.half_width)}"
