"""Judge all graphed runs of a cell against the eager runs of its workload.

A pair that equals its own eager run bit for bit passes only if the eager runs equal each other. If all runs are equal,
earlier attempts with different bits are judged with them. A pair does not pass if its earlier attempts contradict it
(analysis.pairing.flaky_attempts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.pairing.eager_baseline import Digests, EagerBaseline
from analysis.pairing.flaky_attempts import attempts_with_other_bits
from analysis.pairing.pair import Pair
from analysis.records.steps import Steps
from analysis.verdict import ladder
from analysis.verdict.curve_difference import CurveEvidence, measure_differences
from analysis.verdict.verdict import Verdict, worst
from launch.contract.plan import Margins

_HOW_OFTEN = (
    "run the cell in a sweep of its own with more repeats to see how often this happens, and correct that first"
)

Curves = Mapping[str, Steps]


@dataclass(frozen=True)
class _Group:
    """The curves of comparable pairs with the same code, libraries and data, judged together.

    ``some_differ`` is whether some pair differs from its eager run. A pair that equals all eager runs then keeps its own
    verdict.
    """

    eager: Curves
    verdict: Verdict
    some_differ: bool


def judge_pairs(
    pairs: Sequence[Pair], baseline: EagerBaseline, margins: Margins
) -> tuple[tuple[Verdict, ...], Verdict | None]:
    """Return the verdict on each pair, and the worst as the verdict on the cell; None for a cell without pairs.

    ``margins`` are those of ``margins_for`` the cell's spec.
    """
    groups: dict[Digests, _Group] = {}
    for digests in dict.fromkeys(pair.attempts[1].digests for pair in pairs if pair.comparable):
        group = [pair for pair in pairs if pair.comparable and pair.attempts[1].digests == digests]
        groups[digests] = _judge_group(group, baseline, margins)
    judged = [(pair, *_judge_pair(pair, groups)) for pair in pairs]
    flaky = [_name_repeat(pair, verdict) for pair, _, verdict in judged if verdict.fix == _HOW_OFTEN]
    alone = [_name_repeat(pair, own) for pair, own, _ in judged if own]
    together = [
        groups[digests].verdict for digests in dict.fromkeys(p.attempts[1].digests for p, own, _ in judged if not own)
    ]
    verdicts = [*flaky, *alone, *together]
    return tuple(verdict for _, _, verdict in judged), worst(verdicts) if verdicts else None


def _judge_pair(pair: Pair, groups: Mapping[Digests, _Group]) -> tuple[Verdict | None, Verdict]:
    """Return the verdict that the pair decides alone, if any, and its final verdict with its own evidence."""
    if pair.exact and not pair.comparable:
        return pair.exact, pair.exact
    group = groups[pair.attempts[1].digests]
    evidence = _measure(pair, group.eager)
    own = pair.exact if group.some_differ and evidence.bitwise else None
    verdict = own or group.verdict
    if verdict.passes and pair.flaky_attempts:
        reason = f"{'; '.join(pair.flaky_attempts)}: the result is not reproducible"
        return own, Verdict("INCONCLUSIVE", reason, _HOW_OFTEN, evidence)
    return own, replace(verdict, evidence=evidence)


def _name_repeat(pair: Pair, verdict: Verdict) -> Verdict:
    """Return ``verdict`` with the repeat of ``pair`` in its reason, for the verdict on the cell."""
    return replace(verdict, reason=f"repeat {pair.repeat}: {verdict.reason}") if verdict.reason else verdict


def _judge_group(pairs: Sequence[Pair], baseline: EagerBaseline, margins: Margins) -> _Group:
    """Judge comparable ``pairs`` with the same digests together."""
    eager = _eager_curves(pairs, baseline.repeats.get(pairs[0].attempts[1].digests, {}))
    others = _other_attempts(pairs, baseline, margins)
    verdict = _judge_together(eager, pairs, margins, others)
    return _Group(eager, verdict, not any(others) and any(pair.exact is None for pair in pairs))


def _eager_curves(pairs: Sequence[Pair], complete: Mapping[int, Steps]) -> Curves:
    """Return the curve of each pair's eager run, and the ``complete`` eager curves of other repeats."""
    curves = {**complete, **{pair.repeat: pair.attempts[0].steps for pair in pairs}}
    return {f"eager repeat {repeat}": steps for repeat, steps in sorted(curves.items())}


def _other_attempts(pairs: Sequence[Pair], baseline: EagerBaseline, margins: Margins) -> tuple[Curves, Curves]:
    """Return the curves of other attempts, eager and graphed, that differ in some bit from the attempts of ``pairs``.

    Graphed attempts that differ by more than ``margins`` allow are judged by analysis.pairing.flaky_attempts instead.
    """
    digests = pairs[0].attempts[1].digests
    references = {run.repeat: run.attempt for run in baseline.runs if run.attempt and run.attempt.digests == digests}
    references |= {pair.repeat: pair.attempts[0] for pair in pairs}
    eager = {
        f"eager repeat {run.repeat}, attempt {other.number}": other.steps
        for run in baseline.runs
        if run.repeat in references
        for other in attempts_with_other_bits(run, references[run.repeat])
    }
    graphed = {
        f"graphed repeat {pair.repeat}, attempt {other.number}": other.steps
        for pair in pairs
        for other in attempts_with_other_bits(pair.graphed, pair.attempts[1], margins)
    }
    return eager, graphed


def _judge_together(eager: Curves, pairs: Sequence[Pair], margins: Margins, others: tuple[Curves, Curves]) -> Verdict:
    """Judge the curves of ``pairs``. If all are equal bit for bit, judge them with the ``others`` (eager, graphed), too.

    A difference that only those attempts show is intermittent, so it makes the verdict INCONCLUSIVE at worst.
    """
    graphed = {f"graphed repeat {pair.repeat}": pair.attempts[1].steps for pair in pairs}
    expected, first = np.arange(max(map(len, graphed.values()))), max(pair.first_compared for pair in pairs)
    verdict = ladder.judge_curves(eager, graphed, expected, first, margins)
    if verdict.verdict != "BITWISE" or not any(others):
        return verdict
    joint = ladder.judge_curves({**eager, **others[0]}, {**graphed, **others[1]}, expected, first, margins)
    if joint.verdict == "BITWISE":
        return verdict
    reason = f"equal bit for bit except {', '.join([*others[0], *others[1]])}"
    reason += f": {joint.reason}" if joint.reason else ""
    if joint.verdict in ("EQUIVALENT", "INCONCLUSIVE"):
        return replace(joint, reason=reason)
    return Verdict("INCONCLUSIVE", reason, _HOW_OFTEN, joint.evidence)


def _measure(pair: Pair, eager: Curves) -> CurveEvidence:
    """Measure the graphed run of ``pair`` against all ``eager`` ones."""
    window = slice(pair.first_compared, None)
    return measure_differences(tuple(eager.values()), [pair.attempts[1].steps], window).evidence
