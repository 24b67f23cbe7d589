"""The evidence behind verdicts, pair by pair, and what runs remarked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Optional

from analysis.compare import CellResult
from analysis.deviation import Floor
from analysis.load import attempts_of
from analysis.markdown_blocks import cell_text, figure, table
from analysis.pair import PairResult


def evidence(ran: Sequence[CellResult]) -> list[str]:
    pairs = [(result, pair) for result in ran for pair in result.pairs]
    notes = Counter(note for r in ran for a in attempts_of(r.runs) for note in sorted(set(a.notes)))
    blocks = []
    if pairs:
        header = ("cell", "repeat", "attempts, eager / graphed", "verdict", "steps compared", "max loss difference",
                  "max gradient norm difference", "eager against eager", "equal to the bit", "step time")  # fmt: skip
        blocks = ["## Evidence", table(header, (_pair_row(result, pair) for result, pair in pairs)), *_reasons(pairs)]
    if notes:
        lines = (f"- {note} ({count} run{'s' if count > 1 else ''})" for note, count in sorted(notes.items()))
        blocks += ["### Notes of the runs", "\n".join(lines)]
    return blocks


def _pair_row(result: CellResult, pair: PairResult) -> list[str]:
    eager = pair.eager.attempt if pair.eager else None
    attempts = " / ".join(str(attempt.number) if attempt else "none" for attempt in (eager, pair.graphed.attempt))
    found = pair.verdict.evidence
    shown = ["-"] * 5
    if found:
        shown = [
            f"{found.first_step} to {found.last_step} ({found.steps})",
            f"{figure(found.max_loss_difference)} at {found.max_loss_step}",
            f"{figure(found.max_grad_norm_difference)} at {found.max_grad_norm_step}",
            _floor(found.floor),
            f"first {found.bitwise_prefix} of {found.last_step + 1} steps",
        ]
    return [f"`{result.cell.label}`", str(pair.repeat), attempts, pair.verdict.word, *shown, _pair_speed(result, pair)]


def _floor(floor: Optional[Floor]) -> str:
    if floor is None:
        return "unknown"
    return f"loss {figure(floor.loss)}, gradient norm {figure(floor.grad_norm)} ({floor.repeats} repeats)"


def _pair_speed(result: CellResult, pair: PairResult) -> str:
    speed = pair.speed
    if speed.ratio is None:
        return speed.reason
    said = f"{speed.ratio:.3f}x over {speed.steps} steps"
    if result.spec.placement.device == "cpu":
        return said
    tokens = f"{speed.eager_tokens_per_second:,.0f} / {speed.graphed_tokens_per_second:,.0f} tokens/s"
    return f"{said}: {speed.eager_ms:.2f} / {speed.graphed_ms:.2f} ms, {tokens}"


def _reasons(pairs: Sequence[tuple[CellResult, PairResult]]) -> list[str]:
    lines = []
    for result, pair in pairs:
        who = f"`{result.cell.label}`, repeat {pair.repeat}"
        if pair.verdict.reason:
            remedy = f" To settle it: {pair.verdict.remedy}." if pair.verdict.remedy else ""
            lines.append(f"- **{pair.verdict.word}** {who}: {cell_text(pair.verdict.reason)}.{remedy}")
        if pair.differences:
            lines.append(f"- {who}: the environments differ. {cell_text('; '.join(pair.differences))}.")
    return ["\n".join(lines)] if lines else []
