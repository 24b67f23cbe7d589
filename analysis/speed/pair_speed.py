"""The speed-up of one pair: the ratio of mean step times, eager over graphed, in its steady window
(analysis/speed/steady_window.py).

A pair has no speed-up if its runs were in different allocations or overlapped in time, or if its step times contradict the
host's clock.

The break-even step is the cost of the capture divided by the gain per step. The cost is the larger of two times: the extra time
of the graphed run's capture and settling steps over eager steps, and the engine's own capture time. Settling steps found by the
steady window add to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from analysis.records.run import Attempt
from analysis.records.steps import Floats, Integers
from analysis.speed.eager_only_steps import eager_only_steps
from analysis.speed.steady_window import Window, behaviour, window_of
from analysis.speed.trend import FLAT, Profile, profile_of

LEAST_TIMED, MOST_TIMED = 0.05, 1.05
"""The bounds on the share of a run's measured phase that its steps take, by the host's clock. Batches and records take the
rest."""


@dataclass(frozen=True)
class Timed:
    """The measurements of one pair in milliseconds. ``tokens`` is the number of tokens in a global batch."""

    window: Window
    tokens: float
    capture_steps_ms: Floats
    """The graphed run's step times from the capture until it settled, shape (steps,)."""
    capture_ms: float
    """The engine's capture time on the slowest rank."""
    untimed_ms: tuple[float, float] = (0.0, 0.0)
    """The time between measured steps, per step, of the eager and the graphed run, by the host's clock."""


@dataclass(frozen=True)
class PairSpeed:
    """One pair's figures, in milliseconds per step. ``reason`` says why there are none; it is empty otherwise."""

    ratio: float | None = None
    steps: int = 0
    """Number of steps that count."""
    outliers: int = 0
    """Number of outliers."""
    settling: int = 0
    """Number of settling steps."""
    moved: float = 1.0
    """The ratio over all steps of the window, outliers included, divided by ``ratio``."""
    clock: float = 1.0
    """The ratio by the host's clock, including the time between steps, divided by ``ratio``."""
    eager_only: tuple[int, ...] = ()
    """The steps that are long in all eager runs of the cell, and in no graphed one."""
    elsewhere: float = 1.0
    """The ratio without these steps, divided by ``ratio``."""
    profile: Profile = FLAT
    outliers_kept: str = ""
    """Why outliers count after all (analysis/speed/steady_window.py), or empty."""
    eager_ms: float = 0.0
    graphed_ms: float = 0.0
    eager_tokens_per_second: float = 0.0
    graphed_tokens_per_second: float = 0.0
    break_even_step: int | None = None
    """None if graphs save no time."""
    eager_began: float = 0.0
    graphed_began: float = 0.0
    """Seconds since the epoch."""
    allocation: str = ""
    reason: str = ""
    timed: Timed | None = None
    """The measurements. They are dropped once the pairs of the cell are pooled."""


def pair_speed(eager: Attempt, graphed: Attempt) -> PairSpeed:
    """Return the measurements of a pair, or the reason why it has none."""
    if eager.outcome.allocation != graphed.outcome.allocation:
        return PairSpeed(reason="the runs were in different allocations")
    if any(attempt.outcome.ended < attempt.outcome.started for attempt in (eager, graphed)):
        return PairSpeed(reason="the clock of the host was set back during a run, so their order is unknown")
    if eager.outcome.started < graphed.outcome.ended and graphed.outcome.started < eager.outcome.ended:
        return PairSpeed(reason="the eager and the graphed run overlapped in time")
    window = window_of(eager.steps, graphed.steps)
    if isinstance(window, str):
        return PairSpeed(reason=window)
    if doubt := _off_the_clock("eager", eager) or _off_the_clock("graphed", graphed):
        return PairSpeed(reason=doubt)
    of_capture = np.isin(graphed.steps.phase, ("capture", "settle"))
    said = [stats.capture_seconds * 1e3 for stats in {**graphed.captures, **graphed.proofs}.values()]
    tokens = float(np.median(graphed.steps.tokens))
    capture_steps_ms, capture_ms = graphed.steps.step_time_ms[of_capture], max(said, default=0.0)
    untimed_ms = _untimed_ms(eager), _untimed_ms(graphed)
    return PairSpeed(
        eager_began=eager.outcome.started,
        graphed_began=graphed.outcome.started,
        allocation=eager.outcome.allocation,
        timed=Timed(window, tokens, capture_steps_ms, capture_ms, untimed_ms),
    )


def _off_the_clock(side: str, attempt: Attempt) -> str:
    """Return why the times of measured steps contradict the host's clock, or an empty text."""
    steps, phase = float(_measured_ms(attempt).sum()) / 1e3, attempt.measured_seconds
    if LEAST_TIMED * phase <= steps <= MOST_TIMED * phase:
        return ""
    return (
        f"the measured steps of the {side} run add up to {steps:.3g} s, but took {phase:.3g} s by the host's clock; check the "
        "unit and the clock of its step times"
    )


def _untimed_ms(attempt: Attempt) -> float:
    """Return the time per measured step in which no step was timed."""
    times = _measured_ms(attempt)
    return (attempt.measured_seconds * 1e3 - float(times.sum())) / len(times)


def _measured_ms(attempt: Attempt) -> Floats:
    phase = attempt.steps.phase
    times: Floats = attempt.steps.step_time_ms[(phase == "measure") | (phase == "check")]
    return times


def pool_pairs(pairs: Sequence[PairSpeed]) -> tuple[PairSpeed, ...]:
    """Compute the figures of a cell's pairs. All pairs together decide whether outliers count."""
    windows = [pair.timed.window for pair in pairs if pair.timed]
    if not windows:
        return tuple(pairs)
    outliers_kept, eager_only = behaviour(windows), eager_only_steps(windows)
    return tuple(_figures(pair, pair.timed, outliers_kept, eager_only) if pair.timed else pair for pair in pairs)


def _figures(pair: PairSpeed, timed: Timed, outliers_kept: str, eager_only: Integers) -> PairSpeed:
    window = timed.window
    kept = np.ones(len(window), bool) if outliers_kept else ~window.excluded_steps
    eager_ms, graphed_ms = float(window.eager_ms[kept].mean()), float(window.graphed_ms[kept].mean())
    capture_ms = max(timed.capture_ms, float(np.nansum(timed.capture_steps_ms - eager_ms)))
    capture_ms += max(0.0, float((window.settling_ms - eager_ms).sum()))
    gain, ratio = eager_ms - graphed_ms, eager_ms / graphed_ms
    elsewhere = kept & ~np.isin(window.steps, eager_only)
    by_clock = (eager_ms + timed.untimed_ms[0]) / (graphed_ms + timed.untimed_ms[1])
    return replace(
        pair,
        ratio=ratio,
        steps=int(kept.sum()),
        outliers=int((~kept).sum()),
        settling=window.settling,
        moved=float(window.eager_ms.mean() / window.graphed_ms.mean()) / ratio,
        clock=by_clock / ratio,
        eager_only=tuple(eager_only.tolist()),
        elsewhere=float(window.eager_ms[elsewhere].mean() / window.graphed_ms[elsewhere].mean()) / ratio,
        profile=profile_of(window.eager_ms[kept], window.graphed_ms[kept]),
        outliers_kept=outliers_kept,
        eager_ms=eager_ms,
        graphed_ms=graphed_ms,
        eager_tokens_per_second=timed.tokens / eager_ms * 1e3,
        graphed_tokens_per_second=timed.tokens / graphed_ms * 1e3,
        break_even_step=max(1, math.ceil(capture_ms / gain)) if gain > 0 else None,
        timed=None,
    )


def pair_of_graphed(first: PairSpeed, second: PairSpeed) -> PairSpeed:
    """Return a pair of the graphed runs of two pairs that share an eager run. The run of ``first`` is the baseline."""
    return PairSpeed(
        ratio=first.graphed_ms / second.graphed_ms,
        steps=min(first.steps, second.steps),
        moved=second.moved / first.moved,
        clock=second.clock / first.clock,
        profile=tuple(later - earlier for later, earlier in zip(second.profile, first.profile, strict=True)),
        eager_ms=first.graphed_ms,
        graphed_ms=second.graphed_ms,
        eager_began=first.graphed_began,
        graphed_began=second.graphed_began,
        allocation=first.allocation,
    )
