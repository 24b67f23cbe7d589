"""How much faster: the ratio of median step times, eager over graphed, pair by pair within one allocation.

Only steps that are in phase "measure" on both sides count. A figure over fewer than two pairs gives no word: one pair
cannot tell a speed-up from the minute it ran in.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Optional

import numpy as np

from analysis.load import Attempt
from analysis.steps import Floats, Integers, Steps

SpeedWord = Literal["FASTER", "SLOWER", "NEUTRAL", "INCONCLUSIVE"]
BAND = 0.01
"""Ratios within 1 -+ BAND are neutral."""
MINIMUM_PAIRS = 2


@dataclass(frozen=True)
class PairSpeed:
    """One pair's medians over the measured steps. ``reason`` says why there is no ratio; it is empty where there is."""

    ratio: Optional[float] = None
    steps: int = 0
    eager_ms: float = 0.0
    graphed_ms: float = 0.0
    eager_tokens_per_second: float = 0.0
    graphed_tokens_per_second: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Speed:
    """A cell's speed-up over its pairs: the median ratio, and the smallest and largest."""

    word: SpeedWord
    ratio: float
    low: float
    high: float
    pairs: int
    eager_ms: float
    graphed_ms: float
    eager_tokens_per_second: float
    graphed_tokens_per_second: float

    @property
    def summary(self) -> str:
        over = f"over {self.pairs} pairs" if self.pairs > 1 else "1 pair"
        spread = f"{self.low:.2f}-{self.high:.2f} {over}" if self.pairs > 1 else over
        return f"{self.ratio:.2f}x ({spread})"


def pair_speed(eager: Attempt, graphed: Attempt) -> PairSpeed:
    """The ratio of one pair, or the reason for which there is none."""
    if eager.outcome.allocation != graphed.outcome.allocation:
        return PairSpeed(reason="the runs were in different allocations")
    steps = np.intersect1d(_measured(eager.steps), _measured(graphed.steps))
    if len(steps) == 0:
        return PairSpeed(reason="no step was measured in both runs")
    before, after = (side.steps.take(np.isin(side.steps.step, steps)) for side in (eager, graphed))
    if not (_timed(before.step_time_ms) and _timed(after.step_time_ms)):
        return PairSpeed(reason="a step time is not a positive number")
    eager_ms, graphed_ms = float(np.median(before.step_time_ms)), float(np.median(after.step_time_ms))
    return PairSpeed(
        ratio=eager_ms / graphed_ms,
        steps=len(steps),
        eager_ms=eager_ms,
        graphed_ms=graphed_ms,
        eager_tokens_per_second=float(np.median(before.tokens)) / eager_ms * 1e3,
        graphed_tokens_per_second=float(np.median(after.tokens)) / graphed_ms * 1e3,
    )


def _measured(steps: Steps) -> Integers:
    measured: Integers = steps.step[steps.phase == "measure"]
    return measured


def _timed(times: Floats) -> bool:
    return bool((np.isfinite(times) & (times > 0)).all())


def cell_speed(pairs: Sequence[PairSpeed]) -> Optional[Speed]:
    """The cell's figure over the pairs that have a ratio; None where none has."""
    timed = [pair for pair in pairs if pair.ratio is not None]
    ratios = [pair.ratio for pair in timed if pair.ratio is not None]
    if not ratios:
        return None
    return Speed(
        word=speed_word(ratios),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        pairs=len(ratios),
        eager_ms=statistics.median(pair.eager_ms for pair in timed),
        graphed_ms=statistics.median(pair.graphed_ms for pair in timed),
        eager_tokens_per_second=statistics.median(pair.eager_tokens_per_second for pair in timed),
        graphed_tokens_per_second=statistics.median(pair.graphed_tokens_per_second for pair in timed),
    )


def speed_word(ratios: Sequence[float]) -> SpeedWord:
    """FASTER, SLOWER or NEUTRAL where every pair says so, else INCONCLUSIVE."""
    if len(ratios) < MINIMUM_PAIRS:
        return "INCONCLUSIVE"
    if all(ratio > 1 + BAND for ratio in ratios):
        return "FASTER"
    if all(ratio < 1 - BAND for ratio in ratios):
        return "SLOWER"
    if all(1 - BAND <= ratio <= 1 + BAND for ratio in ratios):
        return "NEUTRAL"
    return "INCONCLUSIVE"
