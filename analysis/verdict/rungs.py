"""The rungs of analysis.verdict.judge_curves for complete curves that differ in some bit.

Each rung returns its verdict, or None if it does not decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.records.steps import Integers, Steps
from analysis.verdict.amplified_rounding import FEW_ROUNDINGS
from analysis.verdict.completeness import Curves
from analysis.verdict.curve_difference import METRIC_NAMES, Deviation, Sample, format_unequal
from analysis.verdict.curve_evidence import CurveEvidence, MetricTests, bitwise_prefix
from analysis.verdict.curve_tests.divergence import (
    LASTING,
    SURE,
    SURE_ALONE,
    exceeds_margin_surely,
    is_certain_to_the_bit,
)
from analysis.verdict.curve_tests.equivalence_test import ALPHA
from analysis.verdict.curve_tests.step_test import find_hidden, spike_limit
from analysis.verdict.learning import describe_no_fall, describe_untrained
from analysis.verdict.noise import NoiseFloor, noise_scale
from analysis.verdict.verdict import CHECK_STEPS, DETERMINISTIC, REPEAT, Verdict
from launch.common.text import listed
from launch.contract.plan import MINIMUM_STEPS, Margins
from launch.contract.records.step_metrics import Metric

SMALLER = "capture a smaller scope until the curves agree, and look at the first step that differs"
_SECOND = "add a second eager run (repeats: 2 in a recipe), since it measures the noise floor"
_LESS_NOISE = (DETERMINISTIC, CHECK_STEPS, "lower the learning rate")
_COARSE = "set a margin that suits losses of {size:.3g}, since float32 has seven digits (equivalence.loss in a recipe, --loss-margin of wrap)"
_NOT_DETERMINISTIC = (
    "find the nondeterministic operation of the eager run (see the notes of its runs)",
    "judge by margins (training.deterministic: false)",
)
_JUDGE_STEPS = (
    "judge single steps instead of bits (training.deterministic: false, step_checks: 5), or add repeats: an eager run that differs "
    "too shows that graphs are not the cause"
)
_AGAIN = ("add repeats, since a fault appears in every graphed run and a spike does not", DETERMINISTIC)
_MOVE = "make the loss fall (learning rate, data, loss scale, more steps), or set a margin that suits such losses"
_LEARN = (
    "train for more steps until the loss falls by more. Or set step_checks: 5, which compares what a captured optimizer writes; "
    "for curves from files, compare digests of the parameters after the capture and at the end"
)
_NO_DRIFT = ", so a slow drift would not show"
_LONGER = "train for twice as many steps: growth will leave the margin, and noise will not"
SURE_DRIFT = 2.0
"""If eager noise exceeds the margin, a drift of the mean counts from this many half widths on.

Where noise is small, chance alone rarely reaches the margin. Here every significant rise does, and one in ten is by chance.
"""


@dataclass(frozen=True)
class ComparisonWindow:
    """Complete curves and their measurements after the capture. ``samples`` are in the order of the metrics.

    Their graphed runs are those that ``different`` names: equal ones count once.

    ``expected`` has shape (steps,) and includes the steps before the capture; the window starts at ``expected[first]``.
    """

    eager: Curves
    graphed: Curves
    different: tuple[str, ...]
    expected: Integers
    first: int
    margins: Margins
    samples: tuple[Sample, ...]
    evidence: CurveEvidence
    learnt: bool
    looks: int = 1
    """How often the runs may be judged before the bundle ends. The looks share the error."""
    unrepeatable: str = ""
    """What other records than curves say against repeatable runs; empty if nothing."""


def diverged(window: ComparisonWindow) -> Verdict | None:
    """Return DIVERGED at the first step that certainly exceeds its margin."""
    floor = window.evidence.noise_floor
    if floor is None:
        return None
    deviations, means = [], {tested.metric: tested.mean for tested in window.evidence.tested}
    for sample in window.samples:
        metric = sample.metric
        places = exceeds_margin_surely(sample, window.margins.of(metric), floor.of(metric), means.get(metric))
        if places.any():
            deviations.append((int(np.argmax(places)), sample))
    if not deviations:
        return None
    found = _diverged(window, *min(deviations, key=lambda item: item[0]))
    if any(window.margins.of(metric) > 0 for metric in _metrics(window)):
        return found
    starts = [_equal_steps(window, tuple(window.eager.values()), [one]) for one in window.graphed.values()]
    if is_certain_to_the_bit(window.samples, starts, repeatable=_is_repeatable(window)):
        return found
    # Where eager runs differ, the next rung says so.
    return _unproven(window, found, starts) if _eager_agree(window) else None


def _equal_steps(window: ComparisonWindow, some: Sequence[Steps], others: Sequence[Steps]) -> int:
    """Count the leading compared steps at which each of ``others`` equals one of ``some`` bit for bit."""
    return bitwise_prefix(some, others, slice(window.first, None), _metrics(window))


def _eager_agree(window: ComparisonWindow) -> bool:
    return window.evidence.eager_prefix == window.evidence.steps


def _is_repeatable(window: ComparisonWindow) -> bool:
    """Return whether eager runs equal each other bit for bit, and several graphed runs do too."""
    graphed = tuple(window.graphed.values())
    alike = len(graphed) > 1 and _equal_steps(window, graphed[:1], graphed) == window.evidence.steps
    return alike and _eager_agree(window) and not window.unrepeatable


def _unproven(window: ComparisonWindow, found: Verdict, starts: Sequence[int]) -> Verdict:
    """Return INCONCLUSIVE instead of ``found``, with what was seen. ``starts`` is where each graphed run leaves eager."""
    graphed, all_steps = window.graphed, window.evidence.steps
    equal = [name for name, at in zip(graphed, starts, strict=True) if at == all_steps]
    other = [name for name in graphed if name not in equal]
    cause = f"either a kernel is not deterministic, or the graph {'races' if equal else 'computes something else'}"
    if equal:
        seen = f"{listed(equal)} equal{'s' * (len(equal) == 1)} eager bit for bit, unlike {listed(other)}"
    elif len(other) == 1:
        seen = "the only graphed run differs from eager, at first as little as rounding does"
    else:
        alike = _equal_steps(window, [graphed[other[0]]], list(graphed.values())) == all_steps
        seen = f"all graphed repeats differ from eager, {'in the same way' if alike else 'and from each other'}"
    reason = f"{seen} ({found.reason}): {window.unrepeatable or cause}"
    return Verdict("INCONCLUSIVE", reason, _JUDGE_STEPS, window.evidence)


def _diverged(window: ComparisonWindow, place: int, sample: Sample) -> Verdict:
    metric, size = sample.metric, float(sample.largest[place])
    at = window.first + place
    run = window.different[int(np.argmax(np.abs(sample.graphed[:, place])))]
    eager = float(np.sum([steps.of(metric)[at] / len(window.eager) for steps in window.eager.values()]))
    graphed = float(window.graphed[run].of(metric)[at])
    step = int(window.expected[at])
    values = format_unequal(graphed, eager)
    reason = f"first at step {step}: the {METRIC_NAMES[metric]} is {values[0]} graphed and {values[1]} eager, "
    reason += f"a difference of {size:.3g}{' of it' if metric == 'grad_norm' else ''} ({run})"
    return Verdict("DIVERGED", reason, SMALLER, window.evidence, Deviation(step, metric, size))


def _inconclusive(window: ComparisonWindow, reason: str, *alternatives: str, noisy: bool = False) -> Verdict:
    reason += _of_several(window)
    found = Verdict("INCONCLUSIVE", reason, "", window.evidence, noisy=noisy, alternatives=alternatives)
    # Both sides repeat themselves without it, so with margins of 0 the same difference would be DIVERGED.
    return found.without([DETERMINISTIC]) if _is_repeatable(window) else found


def _of_several(window: ComparisonWindow) -> str:
    """Name the eager runs that graphed runs equal bit for bit, if eager runs differ; return "" if there are none."""
    if _eager_agree(window):
        return ""
    equal = [
        f"{name} equals {other} bit for bit"
        for name, graphed in window.graphed.items()
        for other, eager in window.eager.items()
        if _equal_steps(window, [eager], [graphed]) == window.evidence.steps
    ]
    return f" ({', '.join(equal)}, but eager repeats differ)" if equal else ""


def _metrics(window: ComparisonWindow) -> list[Metric]:
    return [sample.metric for sample in window.samples]


def _largest(window: ComparisonWindow) -> Iterator[tuple[Metric, float, int, float]]:
    """Yield each metric with a step outside its margin: the metric, the largest difference, its step, the margin."""
    for sample in window.samples:
        size, step = window.evidence.largest(sample.metric)
        if not size <= window.margins.of(sample.metric):
            yield sample.metric, size, step, window.margins.of(sample.metric)


def missing_floor(window: ComparisonWindow) -> Verdict | None:
    """Rung 2: return INCONCLUSIVE without a noise floor of two eager repeats, or if spikes put it above the margin."""
    floor = window.evidence.noise_floor
    if floor is None or floor.repeats < 2:
        excess = next((f"{_difference(*largest)}, and " for largest in _largest(window)), "")
        quick = window.margins.mode == "quick" and not excess
        reason = (
            f"{excess}the noise floor is unknown, because it needs two complete eager repeats of the same code and data"
        )
        return _inconclusive(window, reason + _NO_DRIFT * quick, _SECOND, noisy=quick)
    return _large_floor(window, floor, spikes=True)


def _large_floor(window: ComparisonWindow, floor: NoiseFloor, *, spikes: bool) -> Verdict | None:
    """Return INCONCLUSIVE if the noise ``floor`` is above the margin; with ``spikes`` only if a spike puts it there."""
    for sample in window.samples:
        widest, margin = floor.of(sample.metric), window.margins.of(sample.metric)
        if not (widest <= margin or (spikes and _no_spike(sample, widest, margin))):
            reason = (
                f"{floor.source} differ among themselves: their {METRIC_NAMES[sample.metric]} by up to {widest:.3g}, "
            )
            reason += f"and the margin is {margin:g}"
            fixes = _less_noise(window, sample.metric, widest) if margin > 0 else _NOT_DETERMINISTIC
            return _inconclusive(window, reason, *fixes, noisy=margin > 0)
    return None


def _less_noise(window: ComparisonWindow, metric: Metric, widest: float) -> tuple[str, ...]:
    """Return what settles eager runs that differ by up to ``widest``. Less noise does not, if it is the last digits of large losses."""
    size = max(np.abs(steps.loss[window.first :]).max() for steps in window.eager.values())
    return (_COARSE.format(size=size),) if metric == "loss" and widest <= FEW_ROUNDINGS * size else _LESS_NOISE


def _no_spike(sample: Sample, size: float, margin: float) -> bool:
    """Return whether ordinary noise explains an eager difference of ``size`` beyond the margin, so that it is not a spike."""
    return sample.is_finite and size <= spike_limit(sample, noise_scale(sample), margin)


def _difference(metric: Metric, size: float, step: int, margin: float) -> str:
    return f"the {METRIC_NAMES[metric]} difference of {size:.3g} at step {step} exceeds the margin of {margin:g}"


def exceeds_margin(window: ComparisonWindow) -> Verdict | None:
    """Rung 3, step by step: return INCONCLUSIVE if a difference exceeds the margin and may be noise."""
    floor = window.evidence.noise_floor
    for metric, size, step, margin in _largest(window):
        reason = f"{_difference(metric, size, step, margin)}, but may be "
        if larger := _large_floor(window, floor, spikes=False) if floor else None:
            return larger
        if floor and size > margin + SURE_ALONE * floor.of(metric):
            equal = len(window.different) < len(window.graphed)
            spike = f"a rare spike of noise: it lasts for less than {LASTING} steps, and {_where_alone(window)}"
            return _inconclusive(window, f"{reason}{spike}", *(_LESS_NOISE if equal else _AGAIN))
        return _inconclusive(window, f"{reason}noise", *_LESS_NOISE, noisy=True)
    return None


def _where_alone(window: ComparisonWindow) -> str:
    """Say why the graphed runs show a step as one run does."""
    if len(window.different) > 1:
        return "it is not in all of several different graphed runs"
    if len(window.graphed) > 1:
        return "all graphed repeats are equal bit for bit, so they have the same noise and count as one run"
    return "there is only one graphed run"


def hides_difference(window: ComparisonWindow) -> Verdict | None:
    """Rung 3, step by step: return INCONCLUSIVE if noise may hide a true difference beyond the margin."""
    for sample in window.samples:
        margin, scale = window.margins.of(sample.metric), noise_scale(sample)
        if hidden := find_hidden(sample, scale, margin, window.looks):
            reason = (
                f"the {METRIC_NAMES[sample.metric]} difference of {hidden.size:.3g} at step "
                f"{window.expected[window.first + hidden.place]} is within the margin of {margin:g}, but noise of "
                f"{hidden.noise:.3g} ({scale.source}) may hide a larger one: with this noise the limit is {hidden.limit:.3g}"
            )
            return _inconclusive(window, reason, *_LESS_NOISE, noisy=True)
    return None


def too_short(window: ComparisonWindow) -> Verdict | None:
    """Return INCONCLUSIVE if the window has fewer than ``MINIMUM_STEPS`` steps."""
    if window.evidence.steps >= MINIMUM_STEPS:
        return None
    reason = (
        f"within the margins, but only over {window.evidence.steps} steps after the capture; {MINIMUM_STEPS} are needed"
    )
    fix = _train_longer(window)
    if quick := window.margins.mode == "quick":
        reason += _NO_DRIFT
        fix = "set equivalence.mode=full"
    return _inconclusive(window, reason, fix, noisy=quick)


def _train_longer(window: ComparisonWindow) -> str:
    return f"set training.steps to {len(window.expected) - window.evidence.steps + MINIMUM_STEPS} or more"


def not_equivalent(window: ComparisonWindow) -> Verdict | None:
    """Rungs 3 and 4 over the window: return INCONCLUSIVE unless the tests confirm equivalence."""
    if len(window.evidence.tested) < len(window.samples):
        return _inconclusive(window, "a gradient norm is 0, so there is no relative difference", *_LESS_NOISE)
    for tested in window.evidence.tested:
        name, margin = METRIC_NAMES[tested.metric], window.margins.of(tested.metric)
        if not tested.p <= ALPHA:
            reason = f"the mean difference of the {name} is {tested.mean.value:.3g} +- {tested.mean.half_width:.3g}: "
            return _inconclusive(
                window, f"{reason}not shown to be within the margin of {margin:g}", *REPEAT, noisy=True
            )
        if drift := _describe_drift(window, tested):
            return _inconclusive(window, drift, _LONGER)
    return None


def _describe_drift(window: ComparisonWindow, tested: MetricTests, least: float = 1.0) -> str:
    """Describe a drift of ``least`` half widths or more, or growth, that will leave the margin; return "" without one."""
    name, margin = METRIC_NAMES[tested.metric], window.margins.of(tested.metric)
    leaves = f"and will soon leave the margin of {margin:g}"
    if tested.leaves and abs(tested.rise.value) > least * tested.rise.half_width:
        rise = f"{tested.rise.value:.3g} +- {tested.rise.half_width:.3g}"
        beyond = f"more than the margin of {margin:g}" if abs(tested.rise.value) > margin else leaves
        return f"the {name} drifts: the difference changed by {rise} over the window, {beyond}"
    if not (growth := tested.growth):
        return ""
    late = growth.steps < window.evidence.steps
    place = f"at the end of the window, in {growth.steps} steps" if late else "over the window"
    run = window.different[growth.run]
    return f"the {name} difference grows {place}: from {growth.before:.3g} to {growth.after:.3g} ({run}), {leaves}"


def name_other_causes(window: ComparisonWindow, verdict: Verdict) -> Verdict:
    """Return a ``noisy`` verdict unchanged. If it has a different cause than eager noise, name that cause and clear
    ``noisy``."""
    cause = _other_cause(window)
    if not cause:
        return verdict
    short = window.margins.mode == "full" and window.evidence.steps < MINIMUM_STEPS
    fix = _train_longer(window) if short else verdict.fix
    return replace(verdict, reason=f"{verdict.reason}; besides, {cause}", fix=fix, noisy=False)


def _other_cause(window: ComparisonWindow) -> str:
    """Return what keeps the curves from passing besides eager noise, or ""."""
    if window.margins.mode == "full" and len(window.evidence.tested) < len(window.samples):
        if window.evidence.steps < MINIMUM_STEPS:
            return f"only {window.evidence.steps} steps are compared, and tests need {MINIMUM_STEPS}"
        return "tests need two eager repeats and finite differences"
    floor = window.evidence.noise_floor
    for largest in _largest(window):
        metric, size, _, margin = largest
        if floor is None or not size <= margin + SURE * floor.of(metric) < np.inf:
            return f"the {METRIC_NAMES[metric]} exceeds its margin by more than {SURE:g} times the noise floor"
    for sample in window.samples:
        metric, margin = sample.metric, window.margins.of(sample.metric)
        beyond = int((np.abs(sample.graphed) > margin).sum(axis=1).max())
        if floor and floor.of(metric) <= margin and beyond >= LASTING:
            return f"the {METRIC_NAMES[metric]} of a graphed run exceeds the margin at {beyond} steps, but that of eager runs at none"
    for tested in window.evidence.tested:
        mean, margin = tested.mean, window.margins.of(tested.metric)
        if abs(mean.value) - mean.half_width > margin:
            of_mean = f"{mean.value:.3g} +- {mean.half_width:.3g}"
            return f"the mean difference of the {METRIC_NAMES[tested.metric]} is {of_mean}, beyond the margin of {margin:g}"
        noisy = floor is not None and not floor.of(tested.metric) <= margin
        if drift := _describe_drift(window, tested, SURE_DRIFT if noisy else 1.0):
            return drift
    return _describe_unlearnt(window)


def loss_unchanged(window: ComparisonWindow) -> Verdict | None:
    """Return INCONCLUSIVE if the eager loss does not show learning by more than its margin. Any curve would then pass."""
    if still := _describe_still(window):
        return _inconclusive(window, f"within the margins, but {still}", _MOVE)
    unlearnt = _describe_unlearnt(window)
    return _inconclusive(window, f"within the margins, but {unlearnt}", _LEARN) if unlearnt else None


def _describe_still(window: ComparisonWindow) -> str:
    return describe_untrained(tuple(window.eager.values()), window.first, _metrics(window), window.margins.loss)


def _describe_unlearnt(window: ComparisonWindow) -> str:
    """Describe why the eager runs do not show learning; return "" if they do."""
    if (still := _describe_still(window)) or window.learnt:
        return still
    losses = np.mean([steps.loss[window.first :] for steps in window.eager.values()], axis=0)
    return describe_no_fall(losses, window.margins.loss)
