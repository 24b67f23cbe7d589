"""The speed-up of a cell: the ratio of step times, eager over graphed, pair by pair within one allocation.

analysis/speed/pair_speed.py computes the figure of a pair. The cell's figure is the geometric mean of its pairs' ratios, with
an interval from their logarithms (analysis/speed/confidence_interval.py). Logarithms suit ratios, which are multiplicative. The
interval uses pairs because repeats vary independently, while steps do not. One pair gives no interval: it cannot separate a
speed-up from drift over time.

An interval does not show an effect that all pairs share. A verdict must therefore also hold in four other cases:

- Eager times follow their trend from repeat to repeat, and each pair is compared at the time of its graphed run.
- The excluded outliers count.
- A change within the steady windows continues or stays (analysis/speed/trend.py).
- Pairs with the eager run first and pairs with the graphed run first have equal weight.

There is no verdict if repeats do not alternate, if all pairs have the same order, if the host's clock shows less than half
of the gain, or if a FASTER comes mostly from steps that are long in eager runs alone. All cells of a sweep with a verdict form
one family: the probability that any of them is wrongly FASTER or SLOWER is 5%.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from analysis.speed.confidence_interval import (
    ALONE_ONCE,
    MOST_PAIRS,
    Correction,
    Interval,
    interval_of,
    may_agree_by_chance,
    pairs_to_narrow,
)
from analysis.speed.pair_speed import PairSpeed
from analysis.speed.trend import later_ratios
from launch.common.grouped import grouped
from launch.common.text import numbered
from launch.contract.model_flops import model_flops
from launch.contract.spec import RunSpec

SpeedVerdict = Literal["FASTER", "SLOWER", "NEUTRAL", "INCONCLUSIVE"]
BAND = 0.01
"""A ratio is NEUTRAL if its whole interval is within 1 +- BAND."""
MINIMUM_STEPS = 20
"""The minimum number of steady steps per pair for a verdict."""
LEAST_ON_THE_CLOCK = 0.5
"""The share of a gain (of the ratio's logarithm) that the host's clock must show at least."""
LEAST_IN_OTHER_STEPS = 0.5
"""The share of a gain that steps must have that are not long in eager runs alone."""
MOST_DRIFT = 1.0
"""The largest change of a step time's logarithm that drift may cause within a pair. A larger one extrapolates the line too
far."""


@dataclass(frozen=True)
class Speed:
    """A cell's speed-up over its pairs.

    ``low`` and ``high`` bound the interval that decides the verdict. ``own_low`` and ``own_high`` bound the interval of the
    cell

    alone. All four are None with one pair. ``reason`` says why the verdict is INCONCLUSIVE, and ``outliers_kept`` says why
    outliers count; both are empty otherwise. Times are geometric means over pairs, so their ratio is ``ratio``. TFLOP/s are
    model FLOPs per GPU (launch/contract/model_flops.py).
    """

    verdict: SpeedVerdict
    ratio: float
    low: float | None
    high: float | None
    own_low: float | None
    own_high: float | None
    pairs: int
    steps: int
    """Number of steady steps in the pair with the fewest."""
    outliers: int
    """Number of outliers in all pairs."""
    settling: int
    """Number of settling steps in the pair with the most."""
    outliers_kept: str
    break_even_step: int | None
    """The largest of all pairs, or None if graphs save no time in some pair."""
    reason: str
    repeats_to_decide: int | None
    """About how many repeats would decide an INCONCLUSIVE cell. None if repeats would not, or if too many were needed."""
    eager_ms: float
    graphed_ms: float
    eager_tokens_per_second: float
    graphed_tokens_per_second: float
    eager_tflops: float
    graphed_tflops: float

    @property
    def summary(self) -> str:
        over = f"over {self.pairs} pairs" if self.pairs > 1 else "1 pair"
        return f"{self.ratio:.2f}x ({f'{self.interval} ' if self.low is not None else ''}{over})"

    @property
    def interval(self) -> str:
        return "-" if self.low is None or self.high is None else f"{self.low:.2f} to {self.high:.2f}"

    @property
    def has_enough_data(self) -> bool:
        """Whether there are enough pairs and steps for a verdict, which may still be INCONCLUSIVE."""
        return self.low is not None and self.steps >= MINIMUM_STEPS


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


def cell_speed(
    pairs: Sequence[PairSpeed],
    spec: RunSpec,
    family: Correction,
    bounds: RatioBounds = NO_BOUNDS,
    doubt: str = "",
    repeats_option: str = "repeats=",
) -> Speed | None:
    """Return the speed-up of a cell over its pairs that have a ratio, or None if none has.

    The verdict and the interval are those of the cell as one of ``family``. ``repeats_option`` is that of the plan.
    """
    timed = [pair for pair in pairs if pair.ratio is not None]
    if not timed:
        return None
    decision = decide(timed, bounds, doubt, family, repeats_option)
    low, high = decision.interval or (None, None)
    own_low, own_high = decision.own or (None, None)
    break_even = [pair.break_even_step for pair in timed if pair.break_even_step is not None]
    eager_ms, graphed_ms = (
        geometric_mean(times) for times in ([p.eager_ms for p in timed], [p.graphed_ms for p in timed])
    )
    flops = model_flops(spec) / spec.parallelism.world_size / 1e9  # per millisecond, in teraflops per second
    return Speed(
        verdict=decision.verdict,
        ratio=geometric_mean(ratios_of(timed)),
        low=low,
        high=high,
        own_low=own_low,
        own_high=own_high,
        pairs=len(timed),
        steps=min(pair.steps for pair in timed),
        outliers=sum(pair.outliers for pair in timed),
        settling=max(pair.settling for pair in timed),
        outliers_kept=timed[0].outliers_kept,
        break_even_step=max(break_even) if len(break_even) == len(timed) else None,
        reason=decision.reason,
        repeats_to_decide=decision.repeats,
        eager_ms=eager_ms,
        graphed_ms=graphed_ms,
        eager_tokens_per_second=geometric_mean([pair.eager_tokens_per_second for pair in timed]),
        graphed_tokens_per_second=geometric_mean([pair.graphed_tokens_per_second for pair in timed]),
        eager_tflops=flops / eager_ms,
        graphed_tflops=flops / graphed_ms,
    )


def ratios_of(pairs: Sequence[PairSpeed]) -> list[float]:
    """Return the ratios of the pairs that have one."""
    return [pair.eager_ms / pair.graphed_ms for pair in pairs if pair.ratio is not None]


def drift_corrected(pairs: Sequence[PairSpeed]) -> list[float]:
    """Return the ratios with each eager time moved to the time of its graphed run.

    A straight line is fitted to the logarithms of eager step times over the times at which the runs began.
    """
    began, steps = np.array([pair.eager_began for pair in pairs]), np.log([pair.eager_ms for pair in pairs])
    since = began - began.mean()
    slope = float(since @ steps) / float(since @ since) if since.any() else 0.0
    later = [slope * (pair.graphed_began - pair.eager_began) for pair in pairs]
    factors = [math.exp(min(max(rise, -MOST_DRIFT), MOST_DRIFT)) for rise in later]
    return [pair.eager_ms / pair.graphed_ms * factor for pair, factor in zip(pairs, factors, strict=True)]


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


def order_balance(pairs: Sequence[PairSpeed]) -> float:
    """Return the factor by which the mean ratio changes if both orders of pairs have equal weight. Both must occur."""
    logs, eager_first = np.log(ratios_of(pairs)), np.array([pair.eager_began < pair.graphed_began for pair in pairs])
    return math.exp((logs[eager_first].mean() + logs[~eager_first].mean()) / 2 - logs.mean())


def out_of_order(pairs: Sequence[PairSpeed]) -> str:
    """Return why the order of runs within pairs may explain a speed-up, or an empty text."""
    if len({pair.eager_began < pair.graphed_began for pair in pairs}) > 1:
        return ""
    return (
        f"the same side ran first in all {len(pairs)} timed pairs, so an advantage of running first or second looks like a "
        "speed-up; run the workload's cells again, with at least 2 repeats in an allocation"
    )


def not_on_the_clock(pairs: Sequence[PairSpeed]) -> str:
    """Return why the gain per step does not speed up training, or an empty text."""
    ratio, clock = geometric_mean(ratios_of(pairs)), geometric_mean([pair.clock for pair in pairs])
    if math.log(ratio * clock) / math.log(ratio) >= LEAST_ON_THE_CLOCK:
        return ""
    return (
        f"the ratio is {ratio:.3f} by step times, but {ratio * clock:.3f} by the host's clock, which includes the time between "
        "steps; find what runs between steps"
    )


def describe_eager_only_steps(pairs: Sequence[PairSpeed], least: float = 0.0) -> str:
    """Say what steps that are long in eager runs alone contribute to a ratio, or return an empty text if it is less than ``least``."""
    steps, ratio, others = pairs[0].eager_only, geometric_mean(ratios_of(pairs)), _ratio_elsewhere(pairs)
    if not steps or others > ratio * (1 - least):
        return ""
    return (
        f"only eager runs take longer in {numbered('step', steps, 5)}, as for an evaluation or a checkpoint: without these steps "
        f"the ratio is {others:.3f}, not {ratio:.3f}; let both sides do the same in each step"
    )


def slow_in_eager_only(pairs: Sequence[PairSpeed]) -> str:
    """Return why graphs do not cause most of a gain, or an empty text."""
    share = math.log(_ratio_elsewhere(pairs)) / math.log(geometric_mean(ratios_of(pairs)))
    return describe_eager_only_steps(pairs) if share < LEAST_IN_OTHER_STEPS else ""


def _ratio_elsewhere(pairs: Sequence[PairSpeed]) -> float:
    """Return the ratio without the steps that are long in eager runs alone."""
    return geometric_mean(ratios_of(pairs)) * geometric_mean([pair.elsewhere for pair in pairs])


def not_alternating(pairs: Sequence[PairSpeed]) -> str:
    """Return why repeats of one allocation did not alternate, or an empty text."""
    spans = grouped((pair.allocation, sorted((pair.eager_began, pair.graphed_began))) for pair in pairs)
    for found in map(sorted, spans.values()):
        if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(found)):
            return (
                "another repeat began between the two runs of a pair, so a change of the machine in between looks like a "
                "speed-up; run the workload's cells again"
            )
    return ""


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers, or 0 for zeros. The mean of equal numbers equals them bit for bit."""
    first = values[0]
    if first == 0:
        return 0.0
    return float(first * np.exp(np.mean(np.log(np.divide(values, first)))))


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
