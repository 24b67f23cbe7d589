"""Do graphed runs compute what eager ones compute? A ladder of rules over curves, keyed by step, pure.

Rung 0, analysis.completeness: every step is there, once, in order and finite, on both sides, else INCOMPARABLE. A number
after the capture that all eager runs have finite and a graphed one has not is DIVERGED. (What runs have to share beside
their steps, and that what was captured ran, is analysis.pair's to say.)
Rung 1: every graphed run equals an eager one to the bit after the capture: BITWISE.
Rung 2, the floor: how far an eager run is from the others at most. It never widens a margin. Without two of them, or
with a floor beyond the margin, a verdict is INCONCLUSIVE at best.
Rung 3: every graphed run is within the margin of the mean of the eager runs at every step, since a mean hides alternating
signs and single bad steps, and the mean over the window is shown to be within it by two one-sided tests
(analysis.equivalence).
Rung 4, analysis.drift: the line fitted to the differences is not on its way out of the margin, and the last steps do not
blow up.
EQUIVALENT is what passes all of them over ``MINIMUM_STEPS`` steps or more, where eager trained: its loss moved by more than
the margin, and it had gradients.

DIVERGED has to be shown (analysis.divergence). What is neither shown to be within nor beyond is INCONCLUSIVE.

Every gate is written so that NaN fails it. The length comes from a known failure: Megatron-LM issue 5966 (TE graphs over
attention) leaves the eager curve at step 81 and is NaN at 91, so that a check over 50 steps passes it. docs/verdicts.md
has how often the rules err, by simulation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np

from analysis.completeness import Curves, fault_of
from analysis.deviation import (
    METRIC_NAMES,
    METRICS,
    Deviation,
    Evidence,
    Floor,
    Measured,
    Sample,
    Tested,
    measure,
    told_apart,
)
from analysis.divergence import beyond_doubt
from analysis.drift import blows_up, leaves, rise_of_line
from analysis.equivalence import ALPHA, estimate_of, mean_within
from analysis.steps import Integers, Metric, Steps
from analysis.verdict import REPEAT, Verdict
from launch.record import Margins

MINIMUM_STEPS = 100
"""Steps after the capture that EQUIVALENT needs."""

_SMALLER = "capture less (a smaller scope) until it agrees, and compare the first diverging step"
_SECOND = "set repeats to 2 or more: a second eager repeat shows how far eager is from itself"
_REPRODUCE = (
    "make eager reproduce itself first: deterministic mode (training.deterministic: true), else a lower learning rate or "
    "a larger global batch"
)
_NOT_DETERMINISTIC = (
    "find what eager itself does not compute deterministically (the notes of its runs), or judge by margins "
    "(training.deterministic: false)"
)
_SEPARATE = "deterministic mode (training.deterministic: true) tells noise from graphs; else a lower learning rate"
_MOVE = "train on what is learnt (learning rate, data, loss scale), or set a margin that suits such losses"
_LONGER = "train for twice as many steps: what drifts leaves the margin, and noise does not"


@dataclass(frozen=True)
class _Window:
    """Sound curves after the capture, with what was measured of them. Samples are in the order of their metrics."""

    eager: Curves
    graphed: Curves
    expected: Integers
    first: int
    margins: Margins
    samples: tuple[Sample, ...]
    evidence: Evidence

    def margin(self, metric: Metric) -> float:
        return margin_of(self.margins, metric)


def margin_of(margins: Margins, metric: Metric) -> float:
    return margins.loss if metric == "loss" else margins.grad_norm


def first_compared(phases: Sequence[str]) -> Optional[int]:
    """The place after the last capture of a graphed run with these ``phases``, by step; None where it has none."""
    captures = [place for place, phase in enumerate(phases) if phase == "capture"]
    return captures[-1] + 1 if captures else None


def settle(
    eager: Curves, graphed: Curves, expected: Integers, first: int, metrics: Sequence[Metric] = METRICS
) -> Optional[Verdict]:
    """The verdict of rungs 0 and 1, which need no repeats; None where they leave it open.

    The window is from the ``first``-th of the ``expected`` steps on.
    """
    found = _begin(eager, graphed, expected, first, metrics)
    return found if isinstance(found, Verdict) else None


def judge(
    eager: Curves,
    graphed: Curves,
    expected: Integers,
    first: int,
    margins: Margins,
    metrics: Sequence[Metric] = METRICS,
) -> Verdict:
    """The verdict on all graphed runs of one configuration against all eager ones of its workload, the whole ladder."""
    found = _begin(eager, graphed, expected, first, metrics)
    if isinstance(found, Verdict):
        return found
    samples = tuple(found.samples[metric] for metric in metrics)
    evidence = replace(found.evidence, tested=_tested(found, samples, margins))
    window = _Window(eager, graphed, expected, first, margins, samples, evidence)
    return (
        _shown(window)
        or _unknown_floor(window)
        or _beyond(window)
        or _too_short(window)
        or _not_shown(window)
        or _unmoved(window)
        or Verdict("EQUIVALENT", evidence=evidence)
    )


def _begin(
    eager: Curves, graphed: Curves, expected: Integers, first: int, metrics: Sequence[Metric]
) -> Verdict | Measured:
    """Rungs 0 and 1, and what was measured where they leave the verdict open."""
    before, after = tuple(eager.values()), tuple(graphed.values())
    fault = fault_of(eager, graphed, expected, first, metrics)
    if fault and fault.deviation:
        shared = slice(first, min(len(steps) for steps in (*before, *after)))
        evidence = measure(before, after, shared, metrics).evidence
        return Verdict("DIVERGED", fault.reason, _SMALLER, evidence, fault.deviation)
    if fault:
        return Verdict("INCOMPARABLE", fault.reason, fault.remedy)
    found = measure(before, after, slice(first, None), metrics)
    equal = found.evidence.bitwise_prefix == found.evidence.steps
    if not equal:
        return found
    still = _still(before, first, metrics, 0.0)
    return Verdict("BITWISE", f"{still}, so that equality shows little" if still else "", evidence=found.evidence)


def _still(eager: Sequence[Steps], first: int, metrics: Sequence[Metric], margin: float) -> str:
    """How eager did not train from the ``first``-th step on, in words: its mean loss moves by ``margin`` at most, or all its
    gradient norms are 0. Empty where it did."""
    losses = np.mean([steps.loss[first:] for steps in eager], axis=0)
    moved = float(np.ptp(losses))
    if len(losses) > 1 and not moved > margin:
        moves = f"moves by no more than {moved:.3g}" if moved else "does not move"
        return f"the eager loss {moves} over the window: hardly anything is trained"
    if "grad_norm" in metrics and not any(steps.grad_norm[first:].any() for steps in eager):
        return "the eager gradient norm is 0 at every step: nothing is trained"
    return ""


def _tested(found: Measured, samples: Sequence[Sample], margins: Margins) -> tuple[Tested, ...]:
    """What rungs 3 and 4 test, where there is a floor and the window is long enough for them."""
    floor = found.evidence.floor
    if floor is None or found.evidence.steps < MINIMUM_STEPS:
        return ()
    finite = [sample for sample in samples if _is_finite(sample)]
    return tuple(_test(sample, margin_of(margins, sample.metric), floor) for sample in finite)


def _is_finite(sample: Sample) -> bool:
    """A gradient norm of 0 leaves no relative difference to average."""
    return bool(np.isfinite(sample.eager).all() and np.isfinite(sample.graphed).all())


def _test(sample: Sample, margin: float, floor: Floor) -> Tested:
    mean, p = mean_within(sample, margin)
    rise = estimate_of(sample, rise_of_line(sample.graphed.shape[1]))
    late = blows_up(sample, margin, floor.of(sample.metric))
    return Tested(sample.metric, mean, p, rise, leaves=leaves(mean, rise, margin), late=late)


# --- what each rung says --------------------------------------------------------------------------------------------


def _shown(window: _Window) -> Optional[Verdict]:
    """DIVERGED, at the first step that shows it."""
    floor = window.evidence.floor
    if floor is None:
        return None
    found, means = [], {tested.metric: tested.mean for tested in window.evidence.tested}
    for sample in window.samples:
        metric = sample.metric
        beyond = beyond_doubt(sample, window.margin(metric), floor.of(metric), means.get(metric))
        if beyond.any():
            found.append((int(np.argmax(beyond)), sample))
    return _diverged(window, *min(found, key=lambda item: item[0])) if found else None


def _diverged(window: _Window, place: int, sample: Sample) -> Verdict:
    metric, size = sample.metric, float(sample.largest[place])
    at = window.first + place
    run = list(window.graphed)[int(np.argmax(np.abs(sample.graphed[:, place])))]
    eager = float(np.sum([steps.of(metric)[at] / len(window.eager) for steps in window.eager.values()]))
    graphed = float(window.graphed[run].of(metric)[at])
    step = int(window.expected[at])
    values = told_apart(graphed, eager)
    reason = f"first at step {step}: the {METRIC_NAMES[metric]} is {values[0]} graphed and {values[1]} eager, "
    reason += f"a difference of {size:.3g}{' of it' if metric == 'grad_norm' else ''} ({run})"
    return Verdict("DIVERGED", reason, _SMALLER, window.evidence, Deviation(step, metric, size))


def _inconclusive(window: _Window, reason: str, remedy: str) -> Verdict:
    return Verdict("INCONCLUSIVE", reason, remedy, window.evidence)


def _largest(window: _Window) -> Iterator[tuple[Metric, float, int, float]]:
    """For each metric with a step that is not within its margin: the metric, the largest difference, its step, the margin."""
    for sample in window.samples:
        size, step = window.evidence.largest(sample.metric)
        if not size <= window.margin(sample.metric):
            yield sample.metric, size, step, window.margin(sample.metric)


def _unknown_floor(window: _Window) -> Optional[Verdict]:
    """Rung 2."""
    floor = window.evidence.floor
    if floor is None:
        seen = next((f"{_difference(*found)}, and " for found in _largest(window)), "")
        return _inconclusive(window, f"{seen}fewer than two complete eager repeats give no floor", _SECOND)
    for sample in window.samples:
        widest, margin = floor.of(sample.metric), window.margin(sample.metric)
        if not widest <= margin:
            reason = f"eager repeats themselves differ in {METRIC_NAMES[sample.metric]} by up to {widest:.3g}, "
            reason += f"beyond the margin of {margin:g}"
            return _inconclusive(window, reason, _REPRODUCE if margin > 0 else _NOT_DETERMINISTIC)
    return None


def _difference(metric: Metric, size: float, step: int, margin: float) -> str:
    return f"the {METRIC_NAMES[metric]} difference of {size:.3g} at step {step} is beyond the margin of {margin:g}"


def _beyond(window: _Window) -> Optional[Verdict]:
    """Rung 3, step by step."""
    for found in _largest(window):
        reason = f"{_difference(*found)}, though not so far that it cannot be noise"
        return _inconclusive(window, reason, _SEPARATE)
    return None


def _too_short(window: _Window) -> Optional[Verdict]:
    if window.evidence.steps >= MINIMUM_STEPS:
        return None
    reason = f"within the margins, but over {window.evidence.steps} steps after the capture; {MINIMUM_STEPS} are needed"
    remedy = f"set training.steps to {len(window.expected) - window.evidence.steps + MINIMUM_STEPS} or more"
    return _inconclusive(window, reason, remedy)


def _not_shown(window: _Window) -> Optional[Verdict]:
    """Rungs 3 and 4, over the window."""
    if len(window.evidence.tested) < len(window.samples):
        return _inconclusive(window, "a gradient norm of 0 leaves nothing to compare with", _SEPARATE)
    for tested in window.evidence.tested:
        name, margin = METRIC_NAMES[tested.metric], window.margin(tested.metric)
        if not tested.p <= ALPHA:
            reason = f"the mean difference of the {name} is {tested.mean.value:.3g} +- {tested.mean.half_width:.3g}: "
            return _inconclusive(window, f"{reason}not shown to be within the margin of {margin:g}", REPEAT)
        if tested.leaves:
            reason = (
                f"the {name} drifts: the difference rose by {tested.rise.value:.3g} +- {tested.rise.half_width:.3g} "
            )
            return _inconclusive(window, f"{reason}over the window, to leave the margin of {margin:g} soon", _LONGER)
        if tested.late:
            size, step = window.evidence.largest(tested.metric)
            reason = (
                f"the {name} blows up at the end of the window: a difference of {size:.3g} at step {step}, within the "
            )
            return _inconclusive(window, f"{reason}margin of {margin:g} but far above all before it", _LONGER)
    return None


def _unmoved(window: _Window) -> Optional[Verdict]:
    """A margin is absolute: held against a loss that does not move by more, it passes whatever there is."""
    metrics = [sample.metric for sample in window.samples]
    still = _still(tuple(window.eager.values()), window.first, metrics, window.margins.loss)
    return _inconclusive(window, f"within the margins, but {still}", _MOVE) if still else None


if __name__ == "__main__":
    from analysis.loss_command import main

    sys.exit(main())
