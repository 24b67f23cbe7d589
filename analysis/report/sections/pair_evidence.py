"""The evidence behind verdicts, pair by pair, and what runs remarked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from analysis.pairing.pair import PairResult
from analysis.records.run import attempts_of
from analysis.report.sections.tables import cell_text, escape, figure, item, table
from analysis.report.sections.verdict_ladder import ladder, prefix
from analysis.sweep.cell_results import CellResult
from launch.common.text import count


def evidence(ran: Sequence[CellResult]) -> list[str]:
    pairs = [(result, pair) for result in ran for pair in result.pairs]
    notes = Counter(note for r in ran for a in attempts_of(r.runs) for note in sorted(set(a.notes)))
    blocks = []
    if pairs:
        header = ("cell", "repeat", "attempts, eager / graphed", "verdict", "steps compared", "max loss difference",
                  "max gradient norm difference", "equal to the bit", "step time")  # fmt: skip
        rows = (_pair_row(result, pair) for result, pair in pairs)
        blocks = ["## Evidence", table(header, rows), *_reasons(ran), *ladder(ran)]
    if notes:
        lines = (item(f"{note} ({count('run', runs)})") for note, runs in sorted(notes.items()))
        blocks += ["### Notes of the runs", "\n".join(lines)]
    return blocks


def _pair_row(result: CellResult, pair: PairResult) -> list[str]:
    eager = pair.eager.attempt if pair.eager else None
    attempts = " / ".join(str(attempt.number) if attempt else "none" for attempt in (eager, pair.graphed.attempt))
    found = pair.verdict.evidence
    shown = ["-"] * 4
    if found:
        shown = [
            f"{found.first_step} to {found.last_step} ({found.steps})",
            f"{figure(found.max_loss_difference)} at {found.max_loss_step}",
            f"{figure(found.max_grad_norm_difference)} at {found.max_grad_norm_step}",
            prefix(found),
        ]
    return [f"`{result.cell.label}`", str(pair.repeat), attempts, pair.verdict.word, *shown, _pair_speed(result, pair)]


def _pair_speed(result: CellResult, pair: PairResult) -> str:
    speed = pair.speed
    if speed.ratio is None:
        return speed.reason
    said = f"{speed.ratio:.3f}x over {speed.steps} steps"
    if not result.on_gpu:
        return said
    tokens = f"{speed.eager_tokens_per_second:,.0f} / {speed.graphed_tokens_per_second:,.0f} tokens/s"
    return f"{said}: {speed.eager_ms:.2f} / {speed.graphed_ms:.2f} ms, {tokens}"


def _reasons(ran: Sequence[CellResult]) -> list[str]:
    """What verdicts and environments leave open, once for the repeats of a cell that share it."""
    lines = []
    for result in ran:
        repeats: dict[tuple[str, str], list[str]] = {}
        for pair in result.pairs:
            for said in _said(pair, result):
                repeats.setdefault(said, []).append(str(pair.repeat))
        for (before, after), found in repeats.items():
            who = f"`{result.cell.label}`, repeat{'s' if len(found) > 1 else ''} {', '.join(found)}"
            lines.append(escape(f"- {before}{who}: {after}"))
    return ["\n".join(lines)] if lines else []


def _said(pair: PairResult, result: CellResult) -> Iterator[tuple[str, str]]:
    """What stands before and after the name of the cell."""
    verdict = pair.verdict
    if verdict.reason:
        remedy = f" To settle it: {verdict.remedy}{_bisect(result)}." if verdict.remedy else ""
        yield f"**{verdict.word}** ", f"{cell_text(verdict.reason)}.{remedy}{_remarks(pair)}"
    if pair.differences:
        yield "", f"the environments differ. {cell_text('; '.join(pair.differences))}."


def _remarks(pair: PairResult) -> str:
    """What the graphed run said of itself, where that may be why it is not equal."""
    attempt = pair.graphed.attempt
    if pair.verdict.word != "DIVERGED" or attempt is None or not attempt.notes:
        return ""
    return f" The run's own remark: {cell_text('; '.join(sorted(set(attempt.notes))))}."


def _bisect(result: CellResult) -> str:
    """Where several parts are captured, each by itself (docs/bisect.md)."""
    graph = result.spec.cuda_graph
    if (
        len(graph.scope) < 2
        or not graph.implementation.splits_layers
        or result.verdict is None
        or result.verdict.word != "DIVERGED"
    ):
        return ""
    return f"; `python -m orchestrator bisect SWEEP {result.cell.cell_id}` finds the smallest set of parts that fails"
