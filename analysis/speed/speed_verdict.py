"""The verdict on a cell's speed, from the intervals of its pairs' ratios.

An interval does not show an effect that all pairs share. A verdict must therefore also hold in four other cases:

- Eager times follow their trend from repeat to repeat, and each pair is compared at the time of its graphed run.
- The excluded outliers count.
- A change within the steady windows continues or stays (analysis/speed/trend.py).
- Pairs with the eager run first and pairs with the graphed run first have equal weight.

There is no verdict if repeats do not alternate, if all pairs have the same order, if the host's clock shows less than half
of the gain, or if a FASTER comes mostly from steps that are long in eager runs alone (analysis/speed/doubts.py). All cells of
a sweep with a verdict form one family: the probability that any of them is wrongly FASTER or SLOWER is 5%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from analysis.speed.confidence_interval import (
    ALONE_ONCE,
    MOST_PAIRS,
    Correction,
    Interval,
    interval_of,
    may_agree_by_chance,
    pairs_to_narrow,
)
from analysis.speed.doubts import not_alternating, not_on_the_clock, out_of_order, slow_in_eager_only
from analysis.speed.pair_speed import PairSpeed
from analysis.speed.ratios import drift_corrected, geometric_mean, order_balance, ratios_of
from analysis.speed.trend import later_ratios

SpeedVerdict = Literal["FASTER", "SLOWER", "NEUTRAL", "INCONCLUSIVE"]
BAND = 0.01
"""A ratio is NEUTRAL if its whole interval is within 1 +- BAND."""
MINIMUM_STEPS = 20
"""The minimum number of steady steps per pair for a verdict."""


@dataclass(frozen=True)
class RatioBounds:
    """Bounds on the true ratio: ``least`` to ``most`` times the measured one. ``reason`` says why; empty without bounds."""

    least: float = 1.0
    most: float = 1.0
    reason: str = ""


NO_BOUNDS = RatioBounds()


@dataclass(frozen=True)
class Decision:
    """A verdict with its reason, the interval that decided it, and the cell's own interval."""

    verdict: SpeedVerdict
    reason: str
    interval: Interval
    own: Interval
    repeats: int | None = None
    """How many repeats would decide. None if repeats would not, or if too many were needed."""


def decide(
    timed: Sequence[PairSpeed], bounds: RatioBounds, doubt: str, family: Correction, repeats_option: str
) -> Decision:
    """Decide on pairs that have a ratio. ``doubt`` says why the measured step cannot be right; there is then no interval."""
    if doubt:
        return Decision("INCONCLUSIVE", doubt, None, None)
    ratios, steps = ratios_of(timed), min(pair.steps for pair in timed)
    intervals = interval_of(ratios, family), interval_of(ratios, family.alone)
    decision = Decision(*classify(timed, family), *intervals)
    if bounds.reason:
        return bounded(decision, bounds, steps)
    too_wide = steps >= MINIMUM_STEPS and decision.interval and speed_verdict(decision.interval, steps)[1]
    if not too_wide:
        return decision
    repeats = repeats_to_decide(ratios, family)
    by_chance = f", since {len(ratios)} pairs may agree by chance if runs are either fast or slow"
    reason = decision.reason + by_chance * may_agree_by_chance(ratios, family)
    return replace(decision, reason=f"{reason}: {_advise_repeats(repeats, repeats_option)}", repeats=repeats)


def bounded(decision: Decision, bounds: RatioBounds, steps: int) -> Decision:
    """Return the decision that holds for all ratios within ``bounds``, with wider intervals, or none if a bound is infinite."""
    verdict, reason, interval, own = decision.verdict, decision.reason, decision.interval, decision.own
    if not bounds.reason or interval is None or own is None:
        return decision
    wide, own_wide = ((low * bounds.least, high * bounds.most) for low, high in (interval, own))
    still = verdict in ("INCONCLUSIVE", speed_verdict(wide, steps)[0])
    if not (bounds.least > 0 and bounds.most < math.inf and still):
        return Decision("INCONCLUSIVE", bounds.reason, None, None)
    return Decision(verdict, f"{reason}; and {bounds.reason}" if reason else "", wide, own_wide)


def classify(pairs: Sequence[PairSpeed], family: Correction = ALONE_ONCE) -> tuple[SpeedVerdict, str]:
    """Return the verdict on pairs that have a ratio, and why it is INCONCLUSIVE.

    A ``family`` may turn the cell's own verdict into INCONCLUSIVE. It never gives a verdict that the cell alone does not have.
    """
    own, reason = _classify(pairs, family.alone)
    if family == family.alone:
        return own, reason
    verdict, why = _classify(pairs, family)
    if own == "INCONCLUSIVE":
        return own, why or reason
    if verdict == own:
        return own, ""
    ratios, steps = ratios_of(pairs), min(pair.steps for pair in pairs)
    low, high = interval_of(ratios, family.alone) or (math.nan, math.nan)
    said = f"{own} on its own ({low:.3f} to {high:.3f}), but not certain enough among {family.cells} timed cells"
    if speed_verdict(interval_of(ratios, family), steps)[0] == own:
        said = f"{said}: {why}"
    return "INCONCLUSIVE", said


def _classify(pairs: Sequence[PairSpeed], family: Correction) -> tuple[SpeedVerdict, str]:
    """Return the verdict by the interval of ``family``, and why it is INCONCLUSIVE."""
    interval, steps = interval_of(ratios_of(pairs), family), min(pair.steps for pair in pairs)
    verdict, reason = speed_verdict(interval, steps)
    if interval is None or verdict == "INCONCLUSIVE":
        return verdict, reason
    doubt = out_of_order(pairs) or not_alternating(pairs) or (verdict != "NEUTRAL" and not_on_the_clock(pairs))
    if doubt := doubt or (verdict == "FASTER" and slow_in_eager_only(pairs)):
        return "INCONCLUSIVE", doubt
    for other, why in _other_intervals(pairs, interval, family):
        if other and speed_verdict(other, steps)[0] != verdict:
            return "INCONCLUSIVE", why.format(f"{other[0]:.3f} to {other[1]:.3f}")
    return verdict, ""


def _other_intervals(
    pairs: Sequence[PairSpeed], interval: tuple[float, float], family: Correction
) -> tuple[tuple[Interval, str], ...]:
    """Return the other intervals for which the verdict must hold, each with the reason to give if it does not."""
    low, high = interval
    outliers = geometric_mean([pair.moved for pair in pairs])
    least, most = later_ratios([pair.profile for pair in pairs])
    balance = order_balance(pairs)
    return (
        (
            interval_of(drift_corrected(pairs), family),
            "eager steps drifted from repeat to repeat, and without this trend the interval is {}; add repeats, or put fewer "
            "cells into a bundle",
        ),
        (
            (low * outliers, high * outliers),
            "the excluded outliers change the verdict, since over all steps the interval is {}; measure more steps",
        ),
        (
            (low * balance, high * balance),
            "most pairs ran in the same order, and if both orders have equal weight the interval is {}; run the workload's "
            "cells again",
        ),
        (
            (low * least, high * most),
            "the speed-up changes during the measured steps, and after allowing for this the interval is {}; measure more steps",
        ),
    )


def speed_verdict(interval: Interval, steps: int) -> tuple[SpeedVerdict, str]:
    """Return the verdict of an interval over pairs of at least ``steps`` steady steps each, and why it is INCONCLUSIVE.

    An interval within the band is NEUTRAL. Any other interval that excludes 1 is FASTER or SLOWER.
    """
    if interval is None:
        return "INCONCLUSIVE", "one pair cannot separate a speed-up from drift over time: set repeats to 3 or more"
    if steps < MINIMUM_STEPS:
        return (
            "INCONCLUSIVE",
            f"a pair has {steps} steady steps, but a verdict needs {MINIMUM_STEPS}; raise training.steps",
        )
    low, high = interval
    if low >= 1 - BAND and high <= 1 + BAND:
        return "NEUTRAL", ""
    if low > 1:
        return "FASTER", ""
    if high < 1:
        return "SLOWER", ""
    return "INCONCLUSIVE", f"the interval {low:.3f} to {high:.3f} includes 1 and reaches outside 0.99 to 1.01"


def repeats_to_decide(ratios: Sequence[float], family: Correction) -> int | None:
    """Return how many repeats decide on at least two ``ratios``, if later ones vary as much; None if that is too many."""
    change = abs(math.log(geometric_mean(ratios)))
    # Either 1 leaves the interval, or the interval enters the band.
    return pairs_to_narrow(ratios, max(change, math.log1p(BAND) - change), family)


def _advise_repeats(repeats: int | None, option: str) -> str:
    if repeats is None:
        even = f"even {MOST_PAIRS} repeats would not decide, if later pairs vary as much"
        return f"{even}; measure more steps, or use quieter machines"
    return f"about {repeats} repeats should decide, if later pairs vary as much ({option}{repeats})"
