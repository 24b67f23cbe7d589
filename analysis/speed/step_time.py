"""The step of a cell in absolute terms: what cells are ranked by that share no allocation, and so have no ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.records.run import Attempt
from analysis.speed.steady_window import behaviour, window_of


@dataclass(frozen=True)
class StepTime:
    """Milliseconds a step, over ``runs`` that ended with whole records: the median of their means, and the least and the
    most of them. ``allocations`` are where they ran, sorted."""

    milliseconds: float
    low: float
    high: float
    runs: int
    allocations: tuple[str, ...]


def cell_step_time(attempts: Sequence[Attempt]) -> StepTime | None:
    """None where no run has measured steps whose times are positive numbers."""
    means = [(attempt, mean) for attempt in attempts if is_sound(attempt) and (mean := steady_ms(attempt)) is not None]
    if not means:
        return None
    times = [mean for _, mean in means]
    allocations = tuple(sorted({attempt.outcome.allocation for attempt, _ in means}))
    return StepTime(statistics.median(times), min(times), max(times), len(times), allocations)


def is_sound(attempt: Attempt) -> bool:
    """Whether it ended with whole records."""
    return attempt.outcome.results_intact and not attempt.problems


def steady_ms(attempt: Attempt) -> float | None:
    """The mean of the run's own steady window, by the rule of a pair (analysis/speed/steady_window.py); None where it
    has none."""
    window = window_of(attempt.steps, attempt.steps)
    if isinstance(window, str):
        return None
    return float((window.eager_ms if behaviour([window]) else window.eager_ms[~window.excluded_steps]).mean())
