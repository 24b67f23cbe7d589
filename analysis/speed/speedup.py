"""How much faster: the ratio of step times, eager over graphed, pair by pair within one allocation.

A pair's figure is analysis/speed/pair_speed.py's. The cell's is the geometric mean of its pairs' ratios, with an
interval from their logarithms (analysis/statistics/confidence_interval.py): ratios are multiplicative, and a repeat,
not a step, is what varies independently. One pair gives no interval and no word, since it cannot tell a speed-up from
the minute it ran in.

Pairs do not rule out a machine that changes steadily: every graphed run comes after its eager one. A word therefore has to
hold as well for ratios to what the eager runs would have taken at the time of the graphed one, by the straight line through
the logarithms of their steps over the times at which they began.

Nor may what is left out change a word: it has to hold for the interval moved to the mean over all steps of the window,
outliers among them. Repeats that do not alternate give no word. All cells of a sweep that have a word count as one family:
the chance that any of them is wrongly FASTER or SLOWER is 5%.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from analysis.speed.flops import model_flops
from analysis.speed.pair_speed import PairSpeed
from analysis.statistics.confidence_interval import Family, Interval, interval_of
from launch.contract.spec import RunSpec

SpeedVerdict = Literal["FASTER", "SLOWER", "NEUTRAL", "INCONCLUSIVE"]
BAND = 0.01
"""A ratio whose whole interval lies within 1 -+ BAND is neutral."""
MINIMUM_STEPS = 20
"""Steady steps that each pair needs for a word."""

MOST_DRIFT = 1.0
"""The logarithm by which a trend may change a step within a pair: beyond it the line is drawn too far from its points."""


@dataclass(frozen=True)
class Speed:
    """A cell's speed-up over its pairs. ``low`` and ``high`` bound the interval that the word follows from, ``own_low`` and
    ``own_high`` the cell's by itself; None with one pair. ``reason`` says why the word is INCONCLUSIVE, ``off_counts`` why
    steps that are off count; both are empty where there is nothing to say.

    Times are geometric means over pairs, so that their ratio is ``ratio``. Operations are the model's, a GPU
    (analysis/speed/flops.py).
    """

    verdict: SpeedVerdict
    ratio: float
    low: float | None
    high: float | None
    own_low: float | None
    own_high: float | None
    pairs: int
    steps: int
    """Steady steps of the pair that has fewest."""
    left_out: int
    """Outliers, over all pairs."""
    settling: int
    """Steps left out at the beginning of the window, of the pair that has most."""
    off_counts: str
    break_even_steps: int | None
    """Of the pair that takes longest; None where a pair gains nothing."""
    reason: str
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
        return "-" if self.low is None or self.high is None else f"{self.low:.2f}-{self.high:.2f}"

    @property
    def tells(self) -> bool:
        """Whether there is enough for a word; what there is may leave it INCONCLUSIVE."""
        return self.low is not None and self.steps >= MINIMUM_STEPS


@dataclass(frozen=True)
class RatioBounds:
    """The true ratio is from ``least`` to ``most`` times the measured one, for a ``reason``; empty where nothing is known
    against it."""

    least: float = 1.0
    most: float = 1.0
    reason: str = ""


NO_BOUNDS = RatioBounds()


@dataclass(frozen=True)
class Decision:
    """A verdict with its reason, the interval that it follows from, and the cell's own interval."""

    verdict: SpeedVerdict
    reason: str
    interval: Interval
    own: Interval


def decide(timed: Sequence[PairSpeed], bounds: RatioBounds, doubt: str, family: Family | None = None) -> Decision:
    """Decide on pairs that have a ratio. Where the step cannot have been so short (``doubt``), the ratio is all there is."""
    if doubt:
        return Decision("INCONCLUSIVE", doubt, None, None)
    ratios, steps = ratios_of(timed), min(pair.steps for pair in timed)
    return bounded(Decision(*classify(timed, family), interval_of(ratios, family), interval_of(ratios)), bounds, steps)


def bounded(decision: Decision, bounds: RatioBounds, steps: int) -> Decision:
    """Return the decision that holds for all ratios within ``bounds``, with intervals as much wider. Bounds that bound
    nothing leave no interval."""
    word, reason, interval, own = decision.verdict, decision.reason, decision.interval, decision.own
    if not bounds.reason or interval is None or own is None:
        return decision
    wide, own_wide = ((low * bounds.least, high * bounds.most) for low, high in (interval, own))
    if not (bounds.least > 0 and bounds.most < math.inf) or word not in ("INCONCLUSIVE", speed_verdict(wide, steps)[0]):
        return Decision("INCONCLUSIVE", bounds.reason, None, None)
    return Decision(word, f"{reason}; and {bounds.reason}" if reason else "", wide, own_wide)


def cell_speed(
    pairs: Sequence[PairSpeed],
    spec: RunSpec,
    family: Family | None = None,
    bounds: RatioBounds = NO_BOUNDS,
    doubt: str = "",
) -> Speed | None:
    """The figure of a cell of ``spec`` over those of its ``pairs``, taken together, that have a ratio; None of none. The word
    and the interval are the cell's by itself, or as one of ``family``."""
    timed = [pair for pair in pairs if pair.ratio is not None]
    if not timed:
        return None
    decision = decide(timed, bounds, doubt, family)
    low, high = decision.interval or (None, None)
    own_low, own_high = decision.own or (None, None)
    break_even = [pair.break_even_steps for pair in timed if pair.break_even_steps is not None]
    eager_ms, graphed_ms = (
        geometric_mean(times) for times in ([p.eager_ms for p in timed], [p.graphed_ms for p in timed])
    )
    flops = model_flops(spec) / spec.parallelism.world_size / 1e9  # over milliseconds: in units of 10^12 a second
    return Speed(
        verdict=decision.verdict,
        ratio=geometric_mean(ratios_of(timed)),
        low=low,
        high=high,
        own_low=own_low,
        own_high=own_high,
        pairs=len(timed),
        steps=min(pair.steps for pair in timed),
        left_out=sum(pair.left_out for pair in timed),
        settling=max(pair.settling for pair in timed),
        off_counts=timed[0].off_counts,
        break_even_steps=max(break_even) if len(break_even) == len(timed) else None,
        reason=decision.reason,
        eager_ms=eager_ms,
        graphed_ms=graphed_ms,
        eager_tokens_per_second=geometric_mean([pair.eager_tokens_per_second for pair in timed]),
        graphed_tokens_per_second=geometric_mean([pair.graphed_tokens_per_second for pair in timed]),
        eager_tflops=flops / eager_ms,
        graphed_tflops=flops / graphed_ms,
    )


def ratios_of(pairs: Sequence[PairSpeed]) -> list[float]:
    """Of those that have one."""
    return [pair.eager_ms / pair.graphed_ms for pair in pairs if pair.ratio is not None]


def drift_corrected(pairs: Sequence[PairSpeed]) -> list[float]:
    """The ratios of ``pairs`` if eager steps took what they take by their trend at the time of the graphed run."""
    began, steps = np.array([pair.eager_began for pair in pairs]), np.log([pair.eager_ms for pair in pairs])
    since = began - began.mean()
    slope = float(since @ steps) / float(since @ since) if since.any() else 0.0
    later = [slope * (pair.graphed_began - pair.eager_began) for pair in pairs]
    factors = [math.exp(min(max(rise, -MOST_DRIFT), MOST_DRIFT)) for rise in later]
    return [pair.eager_ms / pair.graphed_ms * factor for pair, factor in zip(pairs, factors, strict=True)]


def classify(pairs: Sequence[PairSpeed], family: Family | None = None) -> tuple[SpeedVerdict, str]:
    """The word of ``pairs`` that have a ratio, and why it is INCONCLUSIVE: a cell's own, which a ``family`` may take away. Its
    wider interval gives none, though it may leave the band of NEUTRAL."""
    own, reason = _word(pairs)
    if family is None:
        return own, reason
    word, why = _word(pairs, family)
    if own == "INCONCLUSIVE":
        return own, why or reason
    if word == own:
        return own, ""
    low, high = interval_of(ratios_of(pairs)) or (math.nan, math.nan)
    return "INCONCLUSIVE", (
        f"{own} on its own ({low:.3f} to {high:.3f}), but not certain as one of {family.looks} timed cells: more repeats "
        "narrow the interval"
    )


def _word(pairs: Sequence[PairSpeed], family: Family | None = None) -> tuple[SpeedVerdict, str]:
    """By the interval of ``family``, or by the cell's own."""
    interval, steps = interval_of(ratios_of(pairs), family), min(pair.steps for pair in pairs)
    word, reason = speed_verdict(interval, steps)
    if interval is None or word == "INCONCLUSIVE":
        return word, reason
    if out_of_turn := not_alternating(pairs):
        return "INCONCLUSIVE", out_of_turn
    drifting = interval_of(drift_corrected(pairs), family)
    if drifting and speed_verdict(drifting, steps)[0] != word:
        return "INCONCLUSIVE", (
            f"eager steps changed from repeat to repeat: by their trend the interval is {drifting[0]:.3f} to "
            f"{drifting[1]:.3f}; add repeats, or put fewer cells into a bundle"
        )
    moved = geometric_mean([pair.moved for pair in pairs])
    if speed_verdict((interval[0] * moved, interval[1] * moved), steps)[0] != word:
        return "INCONCLUSIVE", (
            f"the outliers that were left out change the verdict: over all steps the interval is "
            f"{interval[0] * moved:.3f} to {interval[1] * moved:.3f}; measure more steps"
        )
    return word, ""


def not_alternating(pairs: Sequence[PairSpeed]) -> str:
    """Which runs came between those of a pair in one allocation; empty where each pair's came one after the other."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for pair in pairs:
        first, last = sorted((pair.eager_began, pair.graphed_began))
        spans.setdefault(pair.allocation, []).append((first, last))
    for found in map(sorted, spans.values()):
        if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(found)):
            return (
                "eager and graphed runs did not alternate: another repeat began between the two of a pair, and what "
                "changed meanwhile counts as a speed-up; run the workload's cells again"
            )
    return ""


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers; of equal ones that number, to the bit."""
    first = values[0]
    return float(first * np.exp(np.mean(np.log(np.divide(values, first)))))


def speed_verdict(interval: Interval, steps: int) -> tuple[SpeedVerdict, str]:
    """The word of an interval over pairs of at least ``steps`` steady steps each, and why it is INCONCLUSIVE.

    NEUTRAL where it lies within the band; else FASTER and SLOWER where it clears 1.
    """
    if interval is None:
        return "INCONCLUSIVE", "one pair cannot separate a speed-up from drift over time: give the sweep repeats"
    if steps < MINIMUM_STEPS:
        return "INCONCLUSIVE", f"a pair has {steps} steady steps, of at least {MINIMUM_STEPS}: give it more steps"
    low, high = interval
    if low >= 1 - BAND and high <= 1 + BAND:
        return "NEUTRAL", ""
    if low > 1:
        return "FASTER", ""
    if high < 1:
        return "SLOWER", ""
    return (
        "INCONCLUSIVE",
        f"the interval, {low:.3f} to {high:.3f}, includes 1 and more than 1% around it: more repeats narrow it",
    )
