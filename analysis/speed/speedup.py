"""The speed-up of a cell: the ratio of step times, eager over graphed, pair by pair within one allocation.

analysis/speed/pair_speed.py computes the figure of a pair. The cell's figure is the geometric mean of its pairs' ratios, with
an interval from their logarithms (analysis/speed/confidence_interval.py). Logarithms suit ratios, which are multiplicative. The
interval uses pairs because repeats vary independently, while steps do not. One pair gives no interval: it cannot separate a
speed-up from drift over time. analysis/speed/speed_verdict.py says what the interval decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.speed.confidence_interval import Correction
from analysis.speed.pair_speed import PairSpeed
from analysis.speed.ratios import geometric_mean, ratios_of
from analysis.speed.speed_verdict import MINIMUM_STEPS, NO_BOUNDS, RatioBounds, SpeedVerdict, decide
from launch.contract.model_flops import model_flops
from launch.contract.spec import RunSpec


@dataclass(frozen=True)
class Speed:
    """A cell's speed-up over its pairs.

    ``low`` and ``high`` bound the interval that decides the verdict. ``own_low`` and ``own_high`` bound the interval of the
    cell alone. All four are None with one pair. ``reason`` says why the verdict is INCONCLUSIVE, and ``outliers_kept`` says
    why outliers count; both are empty otherwise. Times are geometric means over pairs, so their ratio is ``ratio``. TFLOP/s
    are model FLOPs per GPU (launch/contract/model_flops.py).
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
        return f"{self.ratio:.2f}x ({' '.join(filter(None, (self.interval, over)))})"

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"{self.low:.2f} to {self.high:.2f}"

    @property
    def has_enough_data(self) -> bool:
        """Whether there are enough pairs and steps for a verdict, which may still be INCONCLUSIVE."""
        return self.low is not None and self.steps >= MINIMUM_STEPS


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
