"""The observer's own time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median


class OwnTime:
    """Collects the observer's own time, in seconds."""

    def __init__(self) -> None:
        self._last = 0.0
        self._steps: list[float] = []
        self._norms: list[float] = []

    def end_step(self, hooks: float, *, timed: bool) -> None:
        """End a step. All hooks so far took ``hooks`` seconds.

        In steps that are not timed, gradients are sketched and files are made.
        """
        if timed:
            self._steps.append(hooks - self._last)
        self._last = hooks

    def end_norm(self, seconds: float, *, timed: bool) -> None:
        """Count a gradient norm, which a hook has computed, by itself."""
        if timed:
            self._norms.append(seconds)

    def describe(self) -> str:
        """Return the time per timed step in words, or "" without such a step."""
        if not self._steps:
            return ""
        norms = (
            f", and {_microseconds(self._norms)} for a gradient norm, which the program does not show"
            if self._norms
            else ""
        )
        return f"the observer took {_microseconds(self._steps)} per step{norms}"


def _microseconds(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e6:.0f} us (median; mean {mean(seconds) * 1e6:.0f} us)"
