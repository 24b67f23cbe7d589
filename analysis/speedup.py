"""How much faster: the ratio of step times, eager over graphed, pair by pair within one allocation.

A pair's figure is the ratio of the mean steps of its steady window (analysis/steady.py). The cell's is the geometric mean
of its pairs' ratios, with the two-sided 95% interval of Student's t distribution on their logarithms: ratios are
multiplicative, and a repeat, not a step, is what varies independently. One pair gives no interval and no word, since it
cannot tell a speed-up from the minute it ran in.

Pairs do not rule out a machine that changes steadily: every graphed run comes after its eager one. A word therefore has to
hold as well for ratios to what the eager runs would have taken at the time of the graphed one, by the straight line through
the logarithms of their steps over the times at which they began.

The capture pays off after as many steps as its cost takes: what the graphed run's steps of the capture and of settling
took beyond eager ones, or what the engine says that the capture took, whichever is more, over the gain a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional

import numpy as np

from analysis.flops import model_flops
from analysis.load import Attempt
from analysis.steady import Window, behaviour, window_of
from analysis.steps import Floats
from analysis.student_t import quantile
from launch.spec import RunSpec

SpeedWord = Literal["FASTER", "SLOWER", "NEUTRAL", "INCONCLUSIVE"]
Interval = Optional[tuple[float, float]]
BAND = 0.01
"""A ratio whose whole interval lies within 1 -+ BAND is neutral."""
CONFIDENCE = 0.95
MINIMUM_PAIRS = 2
MINIMUM_STEPS = 20
"""Steady steps that each pair needs for a word."""


@dataclass(frozen=True)
class Timed:
    """What the figures of one pair come from; times are milliseconds. ``tokens`` are a step's, of the global batch."""

    window: Window
    tokens: float
    capture_steps_ms: Floats
    """Of the graphed run, from the capture's own step until it had settled."""
    capture_ms: float
    """What the engine says that the capture took, on the rank that took longest."""
    eager_began: float = 0.0
    graphed_began: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True)
class PairSpeed:
    """One pair's figures; times are milliseconds a step. ``reason`` says why there are none; it is empty where there are."""

    ratio: Optional[float] = None
    steps: int = 0
    """How many count."""
    left_out: int = 0
    """How many were outliers."""
    off_counts: str = ""
    """Why steps that are off count all the same (analysis/steady.py)."""
    eager_ms: float = 0.0
    graphed_ms: float = 0.0
    eager_tokens_per_second: float = 0.0
    graphed_tokens_per_second: float = 0.0
    break_even_steps: Optional[int] = None
    """None where a step gains nothing."""
    eager_began: float = 0.0
    graphed_began: float = 0.0
    reason: str = ""
    timed: Optional[Timed] = None
    """Until the pairs of the cell are taken together, which gives the figures."""


@dataclass(frozen=True)
class Speed:
    """A cell's speed-up over its pairs. ``low`` and ``high`` bound the interval; None with one pair. ``reason`` says why the
    word is INCONCLUSIVE, ``off_counts`` why steps that are off count; both are empty where there is nothing to say.

    Times are geometric means over pairs, so that their ratio is ``ratio``. Operations are the model's, a GPU
    (analysis/flops.py).
    """

    word: SpeedWord
    ratio: float
    low: Optional[float]
    high: Optional[float]
    pairs: int
    steps: int
    """Steady steps of the pair that has fewest."""
    left_out: int
    """Outliers, over all pairs."""
    off_counts: str
    break_even_steps: Optional[int]
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


def pair_speed(eager: Attempt, graphed: Attempt) -> PairSpeed:
    """What the figures of one pair come from, or the reason for which there are none."""
    if eager.outcome.allocation != graphed.outcome.allocation:
        return PairSpeed(reason="the runs were in different allocations")
    window = window_of(eager.steps, graphed.steps)
    if isinstance(window, str):
        return PairSpeed(reason=window)
    of_capture = np.isin(graphed.steps.phase, ("capture", "settle"))
    said = [stats.capture_seconds * 1e3 for stats in {**graphed.captures, **graphed.proofs}.values()]
    tokens = float(np.median(graphed.steps.tokens))
    began = eager.outcome.started, graphed.outcome.started
    return PairSpeed(
        timed=Timed(window, tokens, graphed.steps.step_time_ms[of_capture], max(said, default=0.0), *began)
    )


def together(pairs: Sequence[PairSpeed]) -> tuple[PairSpeed, ...]:
    """The figures of the pairs of one cell: what is an outlier and what behaviour is decided over all of them."""
    off_counts = behaviour([pair.timed.window for pair in pairs if pair.timed])
    return tuple(_figures(pair.timed, off_counts) if pair.timed else pair for pair in pairs)


def _figures(timed: Timed, off_counts: str) -> PairSpeed:
    window = timed.window
    kept = np.ones(len(window), bool) if off_counts else ~window.off
    eager_ms, graphed_ms = float(window.eager_ms[kept].mean()), float(window.graphed_ms[kept].mean())
    capture_ms = max(timed.capture_ms, float(np.nansum(timed.capture_steps_ms - eager_ms)))
    gain = eager_ms - graphed_ms
    return PairSpeed(
        ratio=eager_ms / graphed_ms,
        steps=int(kept.sum()),
        left_out=int((~kept).sum()),
        off_counts=off_counts,
        eager_ms=eager_ms,
        graphed_ms=graphed_ms,
        eager_tokens_per_second=timed.tokens / eager_ms * 1e3,
        graphed_tokens_per_second=timed.tokens / graphed_ms * 1e3,
        break_even_steps=max(1, math.ceil(capture_ms / gain)) if gain > 0 else None,
        eager_began=timed.eager_began,
        graphed_began=timed.graphed_began,
    )


def cell_speed(pairs: Sequence[PairSpeed], spec: RunSpec) -> Optional[Speed]:
    """The figure of a cell of ``spec`` over those of its ``pairs``, taken together, that have a ratio; None of none."""
    timed = [pair for pair in pairs if pair.ratio is not None]
    if not timed:
        return None
    ratios = [pair.eager_ms / pair.graphed_ms for pair in timed]
    interval = interval_of(ratios)
    steps = min(pair.steps for pair in timed)
    word, reason = _word_despite_drift(interval, interval_of(without_drift(timed)), steps)
    break_even = [pair.break_even_steps for pair in timed if pair.break_even_steps is not None]
    eager_ms, graphed_ms = (
        geometric_mean(times) for times in ([p.eager_ms for p in timed], [p.graphed_ms for p in timed])
    )
    flops = model_flops(spec) / spec.parallelism.world_size / 1e9  # over milliseconds: in units of 10^12 a second
    return Speed(
        word=word,
        ratio=geometric_mean(ratios),
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        pairs=len(timed),
        steps=steps,
        left_out=sum(pair.left_out for pair in timed),
        off_counts=timed[0].off_counts,
        break_even_steps=max(break_even) if len(break_even) == len(timed) else None,
        reason=reason,
        eager_ms=eager_ms,
        graphed_ms=graphed_ms,
        eager_tokens_per_second=geometric_mean([pair.eager_tokens_per_second for pair in timed]),
        graphed_tokens_per_second=geometric_mean([pair.graphed_tokens_per_second for pair in timed]),
        eager_tflops=flops / eager_ms,
        graphed_tflops=flops / graphed_ms,
    )


def without_drift(pairs: Sequence[PairSpeed]) -> list[float]:
    """The ratios of ``pairs`` if eager steps took what they take by their trend at the time of the graphed run."""
    began, steps = np.array([pair.eager_began for pair in pairs]), np.log([pair.eager_ms for pair in pairs])
    since = began - began.mean()
    slope = float(since @ steps) / float(since @ since) if since.any() else 0.0
    later = [pair.graphed_began - pair.eager_began for pair in pairs]
    return [pair.eager_ms / pair.graphed_ms * math.exp(slope * dt) for pair, dt in zip(pairs, later, strict=True)]


def _word_despite_drift(interval: Interval, drifting: Interval, steps: int) -> tuple[SpeedWord, str]:
    """The word of ``interval``, if ``drifting``, that of the ratios without drift, gives the same."""
    word, reason = speed_word(interval, steps)
    if drifting is None or word == "INCONCLUSIVE" or speed_word(drifting, steps)[0] == word:
        return word, reason
    low, high = drifting
    return "INCONCLUSIVE", (
        f"eager steps changed from repeat to repeat: by their trend the interval is {low:.3f} to {high:.3f}; more repeats, "
        "or fewer cells to a bundle, tell them apart"
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return float(np.exp(np.mean(np.log(values))))


def interval_of(ratios: Sequence[float]) -> Interval:
    """The two-sided interval of the geometric mean of ``ratios``, positive numbers; None of fewer than two."""
    if len(ratios) < MINIMUM_PAIRS:
        return None
    logs = np.log(ratios)
    half = quantile((1 + CONFIDENCE) / 2, len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    centre = float(logs.mean())
    return math.exp(centre - half), math.exp(centre + half)


def speed_word(interval: Interval, steps: int) -> tuple[SpeedWord, str]:
    """The word of an interval over pairs of at least ``steps`` steady steps each, and why it is INCONCLUSIVE.

    FASTER and SLOWER where the interval clears 1; else NEUTRAL where it lies within the band.
    """
    if interval is None:
        return "INCONCLUSIVE", "one pair cannot tell a speed-up from the minute it ran in: give the sweep repeats"
    if steps < MINIMUM_STEPS:
        return "INCONCLUSIVE", f"a pair has {steps} steady steps, of at least {MINIMUM_STEPS}: give it more steps"
    low, high = interval
    if low > 1:
        return "FASTER", ""
    if high < 1:
        return "SLOWER", ""
    if low >= 1 - BAND and high <= 1 + BAND:
        return "NEUTRAL", ""
    return (
        "INCONCLUSIVE",
        f"the interval, {low:.3f} to {high:.3f}, holds 1 and more than 1% around it: more repeats narrow it",
    )
