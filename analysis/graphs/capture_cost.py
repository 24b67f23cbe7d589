"""The cost of a capture: its graphs and its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.records.run import Attempt


@dataclass(frozen=True)
class CaptureCost:
    """The most graphs of a rank, and the longest capture, over ranks and repeats."""

    graphs: int
    seconds: float


def capture_cost(attempts: Sequence[Attempt]) -> CaptureCost | None:
    """Return the cost from the last statistics of each rank, or None if no rank reported any."""
    said = [stats for attempt in attempts for stats in {**attempt.captures, **attempt.proofs}.values()]
    if not said:
        return None
    return CaptureCost(max(stats.graphs for stats in said), max(stats.capture_seconds for stats in said))
