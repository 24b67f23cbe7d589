"""The evidence behind verdicts: pair by pair, then each rung of analysis.verdict.judge_curves, then the runs' notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from analysis.records.run import attempts_of
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import cell_text, escape, figure, how_to_read, item, table
from analysis.sweep.cell_results import CellResult, PairResult
from analysis.verdict.curve_difference import METRIC_NAMES, Estimate
from analysis.verdict.curve_evidence import CurveEvidence
from launch.common.grouped import grouped
from launch.common.text import count, listed, numbered
from launch.contract.records.step_metrics import METRICS, Metric

PAIR_HEADER = ("cell", "repeat", "attempts, eager / graphed", "verdict", "steps compared", "largest loss difference, nats",
               "largest gradient norm difference, relative", "equal bit for bit", "speed-up")  # fmt: skip
LADDER_HEADER = ("cell", "verdict", "runs, eager / graphed", "metric", "equal bit for bit", "noise floor",
                 "largest difference", "mean difference", "drift", "growth")  # fmt: skip
LADDER_NOTES = (
    "Differences of losses are in nats. Those of gradient norms are relative to eager's norm.",
    "Noise floor: the largest distance of an eager run from the mean of the other eager runs.",
    "Largest difference: the largest distance of a graphed run from the mean of the eager runs.",
    "Mean difference: shown with its interval and p, the chance of so small a mean if the true mean were at the margin.",
    "Drift: how far a line fitted to the differences rises over the window.",
    "Growth: whether differences that grow at the end of the window will leave the margin (docs/verdicts.md).",
    "Only runs of the same code, libraries and data are judged together.",
)


def render(report: ReportData) -> list[str]:
    pairs = [(result, pair) for result in report.shown for pair in result.pairs]
    blocks = []
    if pairs:
        rows = (_pair_row(result, pair) for result, pair in pairs)
        blocks = ["## Evidence", table(PAIR_HEADER, rows), *_reasons(report.shown), *_ladder(report.shown)]
    if faults := [*_known_faults(report.shown), *_repairs(report.shown)]:
        blocks += ["### Known faults", "\n".join(faults)]
    notes = Counter(note for r in report.shown for a in attempts_of(r.runs) for note in sorted(set(a.notes)))
    if notes:
        lines = (item(f"{note} ({count('run', runs)})") for note, runs in sorted(notes.items()))
        blocks += ["### Notes of the runs", "\n".join(lines)]
    return blocks


def _known_faults(shown: Sequence[CellResult]) -> Iterator[str]:
    faults = grouped((fault, result.name) for result in shown for fault in result.cell.known_faults)
    return (item(f"{listed(names)}: [{fault.rule}] {fault.text}") for fault, names in faults.items())


def _repairs(shown: Sequence[CellResult]) -> Iterator[str]:
    repaired = grouped((mend, result.name) for result in shown for mend in result.spec.cuda_graph.mend)
    for mend, names in repaired.items():
        yield item(
            f"{listed(names)}: cuda_graph.mend=[{mend}] repairs a known fault. Your own job keeps it, and the same graphs compute "
            "wrong results there (docs/megatron.md, Repairs)."
        )


# --- pairs ----------------------------------------------------------------------------------------------------------


def _pair_row(result: CellResult, pair: PairResult) -> list[str]:
    eager, evidence = pair.eager.attempt if pair.eager else None, pair.verdict.evidence
    attempts = " / ".join(str(attempt.number) if attempt else "none" for attempt in (eager, pair.graphed.attempt))
    figures = ["-"] * 4
    if evidence:
        figures = [
            f"{evidence.first_step} to {evidence.last_step} ({evidence.steps})",
            _at_step(evidence.max_loss_difference, evidence.max_loss_step),
            _at_step(evidence.max_grad_norm_difference, evidence.max_grad_norm_step),
            _equal_steps(evidence),
        ]
    return [result.name, str(pair.repeat), attempts, pair.verdict.verdict, *figures, _speed(result, pair)]


def _at_step(difference: float, step: int) -> str:
    return f"{figure(difference)} at step {step}" if difference else "0"


def _equal_steps(evidence: CurveEvidence) -> str:
    """Return how many leading steps are equal: graphed to eager, and of eager repeats if they differ."""
    graphed, eager = (_first(prefix, evidence.steps) for prefix in (evidence.bitwise_prefix, evidence.eager_prefix))
    return graphed + (f" (eager repeats: {eager})" if evidence.eager_prefix < evidence.steps else "")


def _first(prefix: int, steps: int) -> str:
    return {0: "no step", steps: f"all {count('step', steps)}"}.get(prefix, f"first {prefix} of {steps} steps")


def _speed(result: CellResult, pair: PairResult) -> str:
    speed = pair.speed
    if speed.ratio is None:
        return speed.reason
    ratio = f"{speed.ratio:.3f}x over {count('step', speed.steps)}"
    if not result.on_gpu:
        return ratio
    # The batch of a user's program may be unknown.
    known = f", {speed.eager_tokens_per_second:,.0f} / {speed.graphed_tokens_per_second:,.0f} tokens/s"
    return f"{ratio}: {speed.eager_ms:.2f} / {speed.graphed_ms:.2f} ms{known if speed.eager_tokens_per_second else ''}"


def _reasons(shown: Sequence[CellResult]) -> list[str]:
    """List the reasons of verdicts and the differences of environments, once for all repeats of a cell that share them."""
    lines = []
    for result in shown:
        repeats = grouped((said, str(pair.repeat)) for pair in result.pairs for said in _pair_reasons(pair, result))
        for (verdict, text), numbers in repeats.items():
            lines.append(escape(f"- {verdict}{result.name}, {numbered('repeat', numbers)}: {text}"))
    return ["\n".join(lines)] if lines else []


def _pair_reasons(pair: PairResult, result: CellResult) -> Iterator[tuple[str, str]]:
    """Yield the text before the cell's name, and the text after it."""
    verdict = pair.verdict
    if verdict.reason:
        fix = f" Fix: {verdict.advice}{_bisect(result)}." if verdict.advice else ""
        yield f"**{verdict.verdict}** ", f"{cell_text(verdict.reason)}.{fix}{_notes(result, pair)}"
    if pair.differences:
        yield "", f"the environments differ. {cell_text('; '.join(pair.differences))}."


def _notes(result: CellResult, pair: PairResult) -> str:
    """Return the known faults of a cell that diverged, and the notes of its graphed run, which may explain why."""
    attempt = pair.graphed.attempt
    if pair.verdict.verdict != "DIVERGED":
        return ""
    known = listed([fault.rule for fault in result.cell.known_faults])
    noted = cell_text("; ".join(sorted(set(attempt.notes)))) if attempt and attempt.notes else ""
    # Notes may end with a fix, which is a sentence.
    return f" Known fault: {known} (below)." * bool(known) + f" The run noted: {noted.removesuffix('.')}." * bool(noted)


def _bisect(result: CellResult) -> str:
    """Return the bisect command if each of several captured parts can be captured alone (docs/bisect.md), else ""."""
    graph = result.spec.cuda_graph
    has_smaller_sets = len(graph.scope) > 1 and graph.implementation.splits_layers
    if not has_smaller_sets or result.verdict is None or result.verdict.verdict != "DIVERGED":
        return ""
    return f"; `python -m orchestrator bisect SWEEP {result.cell.cell_id}` finds the smallest set of parts that fails"


# --- ladder ---------------------------------------------------------------------------------------------------------


def _ladder(shown: Sequence[CellResult]) -> list[str]:
    judged = [(result, result.verdict.evidence) for result in shown if result.verdict and result.verdict.evidence]
    rows = [_rung_row(result, evidence, metric) for result, evidence in judged for metric in METRICS]
    return ["### Loss, rung by rung", table(LADDER_HEADER, rows), *how_to_read(*LADDER_NOTES)] if rows else []


def _rung_row(result: CellResult, evidence: CurveEvidence, metric: Metric) -> list[str]:
    size, step = evidence.largest(metric)
    tested = next((one for one in evidence.tested if one.metric == metric), None)
    tests = ["-"] * 3
    if tested:
        mean = f"{_estimate(tested.mean)} (p {tested.p:.1g})"
        drift = _estimate(tested.rise) + " (leaves the margin)" * tested.leaves
        tests = [mean, drift, "leaves the margin" if tested.growth else "no"]
    runs = f" of {len(result.runs)} each" if evidence.graphed_runs < len(result.runs) else ""
    return [
        result.name,
        result.verdict.verdict if result.verdict else "",
        f"{evidence.eager_runs} / {evidence.graphed_runs}{runs}",
        METRIC_NAMES[metric],
        _equal_steps(evidence),
        figure(evidence.noise_floor.of(metric)) if evidence.noise_floor else "unknown",
        _at_step(size, step),
        *tests,
    ]


def _estimate(estimate: Estimate) -> str:
    return f"{figure(estimate.value)} +- {figure(estimate.half_width)}"
