"""All graphed runs of a cell against the eager runs of its workload: what each pair leaves open is judged together.

Equality to the bit with the eager run of its own repeat settles a pair where eager runs equal each other. What passes is held
against the attempts before it (analysis.pairing.flaky_attempts), and what equals eager to the bit is judged together
with those that came to other bits, eager ones too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from analysis.pairing.eager_baseline import Digests, EagerBaseline
from analysis.pairing.flaky_attempts import attempts_with_other_bits, contradictions
from analysis.pairing.pair import OPEN, PairResult, compare_pair
from analysis.records.run import Run
from analysis.records.steps import Steps
from analysis.verdict import ladder
from analysis.verdict.curve_difference import Evidence, measure_differences
from analysis.verdict.verdict import Verdict, worst
from launch.contract.plan import Margins
from launch.contract.spec import RunSpec

_HOW_OFTEN = "run the cell in a sweep of its own with more repeats, to see how often it comes, and mend that first"


def compare_pairs(
    runs: Sequence[Run], side: EagerBaseline, spec: RunSpec, margins: Margins
) -> tuple[tuple[PairResult, ...], Verdict | None]:
    """What comes of the graphed ``runs`` of ``spec``, pair by pair and over all; None where there are no runs.

    Runs are judged together with those that share their digests. The worst verdict counts.
    """
    faced = [compare_pair(run, side, spec, margins) for run in runs]
    margins = margins_of(spec, margins)
    faced = [_opened(pair, faced, side, margins) for pair in faced]
    together: dict[Digests, Verdict] = {}
    pairs = []
    for pair in faced:
        if pair.verdict is not OPEN:
            pairs.append(pair)
            continue
        group = [other for other in faced if _goes_with(other, pair)]
        eager = _eager(group, side.repeats.get(pair.attempts[1].digests, {}))
        if pair.attempts[1].digests not in together:
            others = _other_attempts(group, side, margins)
            together[pair.attempts[1].digests] = _judge_together(eager, group, margins, others)
        pairs.append(_with(pair, together[pair.attempts[1].digests], eager))
    pairs = [_held_against_before(pair, margins) for pair in pairs]
    came_and_went = [_of_repeat(pair) for pair in pairs if pair.verdict.remedy == _HOW_OFTEN]
    settled = (_of_repeat(pair) for pair in faced if pair.verdict is not OPEN)
    verdicts = [*came_and_went, *settled, *together.values()]
    return tuple(pairs), worst(verdicts) if verdicts else None


def margins_of(spec: RunSpec, margins: Margins) -> Margins:
    """Who asks for determinism asks for equality to the bit."""
    return Margins(loss=0.0, grad_norm=0.0) if spec.training.deterministic else margins


def _held_against_before(pair: PairResult, margins: Margins) -> PairResult:
    """``pair``, which does not pass where an attempt before it of the graphed run came to something else."""
    found = contradictions(pair.graphed, margins) if pair.verdict.passes else ()
    if not found:
        return pair
    reason = f"{'; '.join(found)}: it comes and goes"
    return replace(pair, verdict=replace(pair.verdict, word="INCONCLUSIVE", reason=reason, remedy=_HOW_OFTEN))


def _of_repeat(pair: PairResult) -> Verdict:
    """A pair's own verdict, whose reason says which repeat it is of."""
    verdict = pair.verdict
    return replace(verdict, reason=f"repeat {pair.repeat}: {verdict.reason}") if verdict.reason else verdict


def _goes_with(other: PairResult, pair: PairResult) -> bool:
    """Whether ``other`` is sound too, and of the same code, libraries and data as ``pair``."""
    sound = other.verdict is OPEN or other.verdict.word == "BITWISE"
    return sound and other.attempts[1].digests == pair.attempts[1].digests


def _opened(pair: PairResult, faced: Sequence[PairResult], side: EagerBaseline, margins: Margins) -> PairResult:
    """``pair``, open though it equals its own eager run to the bit, where it does not equal every eager run, or attempts came to
    other bits; and where all pairs equal all eager runs, so that the verdict is on all of them."""
    if pair.verdict.word != "BITWISE":
        return pair
    group = [other for other in faced if _goes_with(other, pair)]
    found = _evidence(pair, _eager(group, side.repeats.get(pair.attempts[1].digests, {})))
    alone = any(other.verdict is OPEN for other in group)
    if alone and found.bitwise and not any(_other_attempts(group, side, margins)):
        return replace(pair, verdict=replace(pair.verdict, evidence=found))
    return replace(pair, verdict=OPEN)


def _eager(pairs: Sequence[PairResult], complete: Mapping[int, Steps]) -> dict[str, Steps]:
    """The eager run of each pair, and the ``complete`` eager runs of other repeats."""
    found = {**complete, **{pair.repeat: pair.attempts[0].steps for pair in pairs}}
    return {f"eager repeat {repeat}": steps for repeat, steps in sorted(found.items())}


def _other_attempts(
    pairs: Sequence[PairResult], side: EagerBaseline, margins: Margins
) -> tuple[dict[str, Steps], dict[str, Steps]]:
    """The curves of other bits that attempts of eager runs, and of the graphed ones of ``pairs``, came to before or since. Those
    of graphed runs that are further off than ``margins`` allow are said by themselves
    (analysis.pairing.flaky_attempts)."""
    digests = pairs[0].attempts[1].digests
    counted = {run.repeat: run.attempt for run in side.runs if run.attempt and run.attempt.digests == digests}
    counted |= {pair.repeat: pair.attempts[0] for pair in pairs}
    eager = {
        f"eager repeat {run.repeat}, attempt {other.number}": other.steps
        for run in side.runs
        if run.repeat in counted
        for other in attempts_with_other_bits(run, counted[run.repeat])
    }
    graphed = {
        f"graphed repeat {pair.repeat}, attempt {other.number}": other.steps
        for pair in pairs
        for other in attempts_with_other_bits(pair.graphed, pair.attempts[1], margins)
    }
    return eager, graphed


def _judge_together(
    eager: Mapping[str, Steps],
    pairs: Sequence[PairResult],
    margins: Margins,
    others: tuple[Mapping[str, Steps], Mapping[str, Steps]],
) -> Verdict:
    """With ``others``, attempts of eager and of graphed runs, where without them all would be equal to the bit. What is off in
    them alone comes and goes."""
    graphed = {f"graphed repeat {pair.repeat}": pair.attempts[1].steps for pair in pairs}
    expected, first = np.arange(max(map(len, graphed.values()))), max(pair.first_compared for pair in pairs)
    verdict = ladder.judge_curves(eager, graphed, expected, first, margins)
    if verdict.word != "BITWISE" or not any(others):
        return verdict
    found = ladder.judge_curves({**eager, **others[0]}, {**graphed, **others[1]}, expected, first, margins)
    if found.word == "BITWISE":
        return verdict
    reason = f"equal to the bit but for {', '.join([*others[0], *others[1]])}"
    reason += f": {found.reason}" if found.reason else ""
    if found.word in ("EQUIVALENT", "INCONCLUSIVE"):
        return replace(found, reason=reason)
    return replace(found, word="INCONCLUSIVE", reason=reason, remedy=_HOW_OFTEN, deviation=None)


def _with(pair: PairResult, verdict: Verdict, eager: Mapping[str, Steps]) -> PairResult:
    """``pair`` by the ``verdict`` on all repeats."""
    return replace(pair, verdict=replace(verdict, evidence=_evidence(pair, eager)))


def _evidence(pair: PairResult, eager: Mapping[str, Steps]) -> Evidence:
    """What is measured of its graphed run against all ``eager`` ones."""
    return measure_differences(
        tuple(eager.values()), [pair.attempts[1].steps], slice(pair.first_compared, None)
    ).evidence
