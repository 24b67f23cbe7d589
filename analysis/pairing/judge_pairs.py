"""Judge all graphed runs of a cell against the eager runs of its workload.

A graphed run that equals its own eager run bit for bit passes only if the eager runs equal each other. If all runs are equal,
other attempts with different bits are judged with them. A pair does not pass if another attempt of its graphed run, or of an
eager run, contradicts it (analysis.pairing.flaky_attempts).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from analysis.pairing.eager_baseline import EagerBaseline, MissingRun
from analysis.pairing.flaky_attempts import OtherAttempt, comparable_attempts, deviations, has_other_bits
from analysis.pairing.logged_runs import judge_logs
from analysis.pairing.pair import IDENTITY, Pair, margins_for
from analysis.pairing.parameter_updates import describe_unequal_ends
from analysis.pairing.precapture_check import START_ALIKE, describe_unlike_start
from analysis.pairing.program_settings import name_other_batches, units_of_runs, widen_by_rounding
from analysis.records.provenance import differences
from analysis.records.run import Attempt, Digests, attempts_of
from analysis.records.steps import Integers, Steps
from analysis.verdict.completeness import Curves
from analysis.verdict.curve_difference import METRIC_NAMES
from analysis.verdict.curve_evidence import CurveEvidence, bitwise_prefix, measure_differences
from analysis.verdict.judge_curves import judge_curves
from analysis.verdict.rounding import judge_rounded
from analysis.verdict.verdict import Verdict, worst
from launch.common.text import listed
from launch.contract.plan import Margins
from launch.contract.records.step_metrics import METRICS
from launch.contract.spec import RunSpec

_HOW_OFTEN = "correct this first; more repeats in a sweep of its own show how often it happens"

OTHER_CONDITIONS = 10.0
"""If eager repeats are this many times as far apart before the capture as the runs of a pair, they did not run alike."""
_ONE_MACHINE = "run all repeats on one machine, in a sweep with another name"
_ONE_CODE = "run all repeats with the same code, libraries and data, in a sweep with another name"


@dataclass(frozen=True)
class _Group:
    """The curves of comparable pairs with the same code, libraries and data, judged together.

    ``some_differ`` is whether some pair differs from its eager run. A pair that equals all eager runs then keeps its own
    BITWISE verdict.
    """

    eager: Curves
    perturbed: Steps | None
    verdict: Verdict
    some_differ: bool


@dataclass(frozen=True)
class _OtherAttempts:
    """Comparable attempts other than those that count.

    ``eager`` and ``graphed`` are curves that differ in some bit, but not by more than the margins. ``deviating`` describes the
    eager attempts that differ by more.
    """

    eager: Curves
    graphed: Curves
    deviating: tuple[str, ...]

    @property
    def exist(self) -> bool:
        return any((self.eager, self.graphed, self.deviating))


def judge_pairs(
    pairs: Sequence[Pair],
    baseline: EagerBaseline,
    spec: RunSpec,
    margins: Margins,
    looks: int,
    elsewhere: Mapping[str, Attempt],
) -> tuple[tuple[Verdict, ...], Verdict | None]:
    """Return the verdict on each pair, and the worst one as the verdict on the cell (None for a cell without pairs).

    ``spec`` and ``margins`` are those of the cell and its plan. ``looks`` is the number of looks that share the error.
    ``elsewhere`` has the runs of the workload's other graphed cells, by their names in sentences.
    """
    margins = margins_for(spec, margins)
    if any(pair.made_elsewhere for pair in pairs):
        return judge_logs(pairs, baseline, margins)
    groups: dict[Digests, _Group] = {}
    for digests in dict.fromkeys(pair.attempts[1].digests for pair in pairs if pair.comparable):
        group = [pair for pair in pairs if pair.comparable and pair.attempts[1].digests == digests]
        judged_as = _judge_group(group, baseline, margins, looks, spec)
        groups[digests] = _name_equal_runs(judged_as, group, elsewhere)
    judged = [(pair, *_judge_pair(pair, groups)) for pair in pairs]
    alone = [_name_repeat(pair, own) for pair, own, _ in judged if own]
    together = [
        groups[digests].verdict for digests in dict.fromkeys(p.attempts[1].digests for p, own, _ in judged if not own)
    ]
    verdicts = [*alone, *together]
    return tuple(verdict for _, _, verdict in judged), worst(verdicts) if verdicts else None


def _judge_pair(pair: Pair, groups: Mapping[Digests, _Group]) -> tuple[Verdict | None, Verdict]:
    """Return the verdict that the pair alone decides (or None), and its final verdict with its own evidence."""
    if pair.exact and not pair.comparable:
        return pair.exact, pair.exact
    group = groups[pair.attempts[1].digests]
    evidence = _measure(pair, group)
    own = pair.exact if group.some_differ and evidence.bitwise else None
    verdict = own or group.verdict
    if verdict.passes and pair.flaky_attempts:
        flaky = _not_reproducible(pair.flaky_attempts.values(), evidence)
        return flaky, flaky
    if pair.doubt and (verdict.passes or verdict.noisy):
        doubt = replace(pair.doubt, evidence=evidence)
        return doubt, doubt
    if pair.doubt and verdict.verdict == "INCONCLUSIVE" and not verdict.needed_run:
        # It names a cause that curves cannot tell from noise.
        reason = f"{verdict.reason}; besides, {pair.doubt.reason}"
        doubt = replace(pair.doubt, reason=reason, evidence=evidence)
        return doubt, doubt
    return own, replace(verdict, evidence=evidence)


def _not_reproducible(descriptions: Iterable[str], evidence: CurveEvidence | None) -> Verdict:
    return Verdict("INCONCLUSIVE", f"{'; '.join(descriptions)}: the result is not reproducible", _HOW_OFTEN, evidence)


def _name_repeat(pair: Pair, verdict: Verdict) -> Verdict:
    """Return ``verdict`` with the repeat of ``pair`` in its reason, for the verdict on the cell."""
    return replace(verdict, reason=f"repeat {pair.repeat}: {verdict.reason}") if verdict.reason else verdict


def _describe_attempts(pairs: Sequence[Pair], baseline: EagerBaseline) -> str:
    """Name the attempts with other bits than the attempt of the same run that counts."""
    first, digests = _first_compared(pairs), pairs[0].attempts[1].digests
    used = {run.repeat: run.attempt for run in baseline.runs} | {pair.repeat: pair.attempts[0] for pair in pairs}
    runs = [("eager", run, used[run.repeat]) for run in baseline.runs]
    runs += [("graphed", pair.graphed, pair.attempts[1]) for pair in pairs]
    names = [
        f"attempt {other.number} of {side} repeat {run.repeat}"
        for side, run, own in runs
        for other in comparable_attempts(run, own, digests)
        if own and own.digests == digests and has_other_bits(other.steps, own.steps, first)
    ]
    if not names:
        return ""
    return f"{listed(names)} differ{'s' * (len(names) == 1)} from the attempt that counts, so not every run repeats to the bit"


def _describe_ends(pairs: Sequence[Pair], baseline: EagerBaseline, spec: RunSpec) -> str:
    # With this overlap, parameters of other ranks arrive in the next forward pass.
    if spec.parallelism.overlap_param_gather:
        return ""
    graphed = [pair.attempts[1] for pair in pairs]
    others = (one for one in attempts_of(baseline.runs) if one.digests == graphed[0].digests)
    return describe_unequal_ends([*(pair.attempts[0] for pair in pairs), *others], graphed)


def _describe_other_code(pairs: Sequence[Pair], baseline: EagerBaseline) -> str:
    """Name the eager repeats that ran with other code, libraries or data than ``pairs``, and what differs."""
    own, _ = pairs[0].attempts
    others = {run.repeat: run.attempt for run in baseline.runs if run.attempt and run.attempt.digests != own.digests}
    found = (text for one in others.values() for text in differences(own.environment, one.environment))
    # A digest differs only if something else differs.
    names = {text.partition(":")[0] for text in found if text.startswith(IDENTITY) and not text.startswith("digests.")}
    if not names:
        return ""
    repeats = listed([f"repeat {repeat}" for repeat in others])
    return f"eager {repeats} ran with other code, libraries or data ({', '.join(sorted(names))})"


def _name_equal_runs(group: _Group, pairs: Sequence[Pair], elsewhere: Mapping[str, Attempt]) -> _Group:
    """Name a run of another cell that a graphed run equals bit for bit, although it differs from all eager runs."""
    if group.verdict.verdict not in ("DIVERGED", "INCONCLUSIVE"):
        return group
    window, eager = slice(_first_compared(pairs), None), tuple(group.eager.values())
    for pair in pairs:
        own = pair.attempts[1]
        steps = len(own.steps.take(window))
        if bitwise_prefix(eager, [own.steps], window, METRICS) == steps:
            continue
        for name, other in elsewhere.items():
            alike = other.digests == own.digests and np.array_equal(other.steps.step, own.steps.step)
            if alike and bitwise_prefix([other.steps], [own.steps], window, METRICS) == steps:
                reason = f"{group.verdict.reason}; graphed repeat {pair.repeat} equals {name} bit for bit, so both may have one cause"
                return replace(group, verdict=replace(group.verdict, reason=reason))
    return group


def _judge_group(pairs: Sequence[Pair], baseline: EagerBaseline, margins: Margins, looks: int, spec: RunSpec) -> _Group:
    """Judge comparable ``pairs`` with the same digests together."""
    digests = pairs[0].attempts[1].digests
    eager, perturbed = _eager_curves(pairs, baseline.repeats.get(digests, {})), baseline.perturbed_steps(digests)
    others = _other_attempts(pairs, baseline, tuple(eager.values()), margins)
    # Records besides the curves that count may show that one side does not repeat to the bit.
    unrepeatable = _describe_ends(pairs, baseline, spec) or _describe_attempts(pairs, baseline)
    verdict = _judge_together(eager, pairs, margins, others, perturbed, looks, unrepeatable)
    if verdict.noisy:
        # Noise does not explain a flaky attempt, and step checks cover only the attempts that count.
        flaky = (text for pair in pairs for text in pair.flaky_attempts.values())
        conditions = _other_conditions(pairs)
        causes = (*flaky, *others.deviating, *filter(None, [conditions]))
        verdict = replace(verdict, reason="; ".join((verdict.reason, *causes)), noisy=not causes)
        if conditions:
            verdict = replace(verdict, fix=_ONE_MACHINE, alternatives=())
    graphed = _graphed_curves(pairs)
    wide = widen_by_rounding(margins, pairs[0].attempts[1], eager, graphed, slice(1))
    unlike = describe_unlike_start({**eager, **graphed}, wide) if spec.engine == "command" else ""
    if unlike and verdict.verdict == "INCONCLUSIVE":
        # More repeats would not remove this cause.
        verdict = replace(verdict, reason=f"{verdict.reason}; {unlike}", fix=START_ALIKE, alternatives=(), noisy=False)
    verdict = name_other_batches(verdict, [pair.attempts for pair in pairs])
    if len(eager) < 2 and verdict.verdict == "INCONCLUSIVE" and (changed := _describe_other_code(pairs, baseline)):
        verdict = replace(verdict, reason=f"{verdict.reason}; {changed}", fix=_ONE_CODE, alternatives=())
    if perturbed is None and baseline.missing and _may_be_rounding(verdict):
        verdict = _await_perturbed(verdict, baseline.missing)
    return _Group(eager, perturbed, verdict, not others.exist and any(pair.exact is None for pair in pairs))


def _other_conditions(pairs: Sequence[Pair]) -> str:
    """Describe why the distance of eager repeats is not the noise of a pair; return "" if it is.

    Before the capture, noise makes a graphed run differ from its own eager run as far as from other eager runs. If it does not,
    each repeat ran on its own machine, or the like. Pairs that are equal bit for bit need no noise.
    """
    before, eager = slice(_first_compared(pairs)), [pair.attempts[0].steps for pair in pairs]
    apart = measure_differences(eager[:1], eager, before).evidence
    inside = [measure_differences([a.steps], [b.steps], before).evidence for a, b in (pair.attempts for pair in pairs)]
    sizes = {metric: (apart.largest(metric)[0], max(one.largest(metric)[0] for one in inside)) for metric in METRICS}
    alike = any(between < OTHER_CONDITIONS * own for between, own in sizes.values())
    metric = next((metric for metric, (between, _) in sizes.items() if between > 0), None)
    if metric is None or alike or all(pair.exact for pair in pairs):
        return ""
    return (
        f"before the capture, the {METRIC_NAMES[metric]} of eager repeats differs by {sizes[metric][0]:.2g}, but within pairs by at "
        f"most {sizes[metric][1]:.2g}: repeats ran under different conditions, such as other machines, so their distance is not "
        "the noise of a pair"
    )


def _may_be_rounding(verdict: Verdict) -> bool:
    """Return whether rounding may explain ``verdict``, because the eager runs are bitwise equal.

    Such runs do not show how far other kernels' rounding grows. Rounding does not explain a number that is not finite.
    """
    evidence = verdict.evidence
    if evidence is None or evidence.eager_runs < 2 or evidence.eager_prefix < evidence.steps:
        return False
    if verdict.verdict == "DIVERGED":
        return verdict.deviation is not None and math.isfinite(verdict.deviation.size)
    return verdict.verdict == "INCONCLUSIVE" and any(tested.growth for tested in evidence.tested)


def _await_perturbed(verdict: Verdict, missing: MissingRun) -> Verdict:
    """Return INCONCLUSIVE until the perturbed run shows how far rounding alone can go."""
    reason = (
        f"{verdict.reason}. Eager repeats are bitwise equal, so only the perturbed run {missing.run_id} shows whether "
        "rounding alone explains this"
    )
    return Verdict("INCONCLUSIVE", reason, missing.fix, verdict.evidence, needed_run=missing.run_id)


def _eager_curves(pairs: Sequence[Pair], complete: Mapping[int, Steps]) -> Curves:
    """Return the curve of each pair's eager run, and the ``complete`` eager curves of other repeats."""
    curves = {**complete, **{pair.repeat: pair.attempts[0].steps for pair in pairs}}
    return {f"eager repeat {repeat}": steps for repeat, steps in sorted(curves.items())}


def _graphed_curves(pairs: Sequence[Pair]) -> Curves:
    return {f"graphed repeat {pair.repeat}": pair.attempts[1].steps for pair in pairs}


def _other_attempts(
    pairs: Sequence[Pair], baseline: EagerBaseline, curves: Sequence[Steps], margins: Margins
) -> _OtherAttempts:
    """Compare attempts other than those of ``pairs`` with eager ``curves``. Pairs judge their own flaky graphed attempts."""
    digests, first = pairs[0].attempts[1].digests, _first_compared(pairs)
    used = {run.repeat: run.attempt for run in baseline.runs} | {pair.repeat: pair.attempts[0] for pair in pairs}
    unequal: tuple[dict[str, Steps], dict[str, Steps]] = ({}, {})
    deviating = []
    for run in baseline.runs:
        others = comparable_attempts(run, used[run.repeat], digests)
        flaky = deviations(others, curves, margins, first)
        deviating += [f"eager repeat {run.repeat}: {description}" for description in flaky.values()]
        unequal[0].update(_unequal_curves(f"eager repeat {run.repeat}", others, flaky, curves[0], first))
    for pair in pairs:
        others, name = comparable_attempts(pair.graphed, pair.attempts[1], digests), f"graphed repeat {pair.repeat}"
        unequal[1].update(_unequal_curves(name, others, pair.flaky_attempts, curves[0], first))
    return _OtherAttempts(*unequal, tuple(deviating))


def _unequal_curves(
    side: str, others: Sequence[OtherAttempt], flaky: Mapping[int, str], than: Steps, first: int
) -> Curves:
    """Return the curves of ``others`` that are not ``flaky`` and differ from ``than`` in some bit from ``first`` on."""
    return {
        f"{side}, attempt {other.number}": other.steps
        for other in others
        if other.number not in flaky and has_other_bits(other.steps, than, first)
    }


def _judge_together(
    eager: Curves,
    pairs: Sequence[Pair],
    margins: Margins,
    others: _OtherAttempts,
    perturbed: Steps | None,
    looks: int,
    unrepeatable: str,
) -> Verdict:
    """Judge the curves of ``pairs``. If all are equal bit for bit, also judge them together with the unequal ``others``.

    A difference that only other attempts show is intermittent, so the verdict is INCONCLUSIVE at worst.
    """
    graphed = _graphed_curves(pairs)
    expected = np.arange(max(map(len, graphed.values())))
    first, learnt = _first_compared(pairs), all(pair.learns for pair in pairs)
    ladder = partial(judge_curves, learnt=learnt, looks=looks, unrepeatable=unrepeatable)

    def judge(eager: Curves, graphed: Curves, expected: Integers, perturbed: Steps | None) -> Verdict:
        def climb(eager: Curves, graphed: Curves, margins: Margins) -> Verdict:
            return ladder(eager, graphed, expected, first, margins, perturbed=perturbed)

        units = units_of_runs(pairs[0].attempts[1], {**eager, **graphed})
        return judge_rounded(climb, eager, graphed, units, first, margins)

    verdict = judge(eager, graphed, expected, perturbed)
    if verdict.passes and others.deviating:
        return _not_reproducible(others.deviating, verdict.evidence)
    unequal = {**others.eager, **others.graphed}
    if not (verdict.passes and verdict.evidence and verdict.evidence.bitwise and unequal):
        return verdict
    # A partial curve shortens the comparison.
    shared = slice(min(len(steps) for steps in (*graphed.values(), *unequal.values())))
    before, after = (
        {name: steps.take(shared) for name, steps in side.items()}
        for side in ({**eager, **others.eager}, {**graphed, **others.graphed})
    )
    moved = perturbed.take(shared) if perturbed else None
    joint = judge(before, after, expected[shared], moved)
    reason = f"equal bit for bit except {', '.join(unequal)}{f': {joint.reason}' if joint.reason else ''}"
    if joint.verdict == "EQUIVALENT":
        return replace(joint, reason=reason)
    return Verdict("INCONCLUSIVE", reason, _HOW_OFTEN, joint.evidence)


def _first_compared(pairs: Sequence[Pair]) -> int:
    return max(pair.first_compared for pair in pairs)


def _measure(pair: Pair, group: _Group) -> CurveEvidence:
    """Measure the differences of the graphed run of ``pair`` from all eager runs of its ``group``."""
    window, eager = slice(pair.first_compared, None), tuple(group.eager.values())
    return measure_differences(eager, [pair.attempts[1].steps], window, perturbed=group.perturbed).evidence
