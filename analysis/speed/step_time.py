"""A cell's absolute step time. It ranks cells of different allocations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.records.run import Attempt
from analysis.speed.ratios import geometric_mean
from analysis.speed.steady_window import behaviour, window_of


@dataclass(frozen=True)
class StepTime:
    """Milliseconds per step over ``runs`` with complete records: the geometric mean, minimum and maximum of their means.

    ``allocations`` are sorted.
    """

    milliseconds: float
    low: float
    high: float
    runs: int
    allocations: tuple[str, ...]


def cell_step_time(attempts: Sequence[Attempt]) -> StepTime | None:
    """Return a cell's step time, or None if no run has plausible measured steps."""
    means = [(attempt, mean) for attempt in attempts if is_sound(attempt) and (mean := steady_ms(attempt)) is not None]
    if not means:
        return None
    times = [mean for _, mean in means]
    allocations = tuple(sorted({attempt.outcome.allocation for attempt, _ in means}))
    return StepTime(geometric_mean(times), min(times), max(times), len(times), allocations)


def is_sound(attempt: Attempt) -> bool:
    """Return whether the attempt ended with complete records."""
    return attempt.outcome.results_intact and not attempt.problems


def steady_ms(attempt: Attempt) -> float | None:
    """Return the mean step time of a run's own steady window, or None. The window is that of a pair of the run with itself."""
    window = window_of(attempt.steps, attempt.steps)
    if isinstance(window, str):
        return None
    return float((window.eager_ms if behaviour([window]) else window.eager_ms[~window.excluded_steps]).mean())
