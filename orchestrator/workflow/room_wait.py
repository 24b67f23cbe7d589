"""When to ask Slurm again for room, and when to tell how long runs have waited for it."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_SECONDS = 30.0
"""The pause before the first try."""
MOST_SECONDS = 300.0
"""The longest pause. Jobs of others may fill the queue for days."""


class RoomWait:
    """The wait of a backlog. Each try in vain doubles the pause, and each time that has doubled is told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Wait from now on, because something was submitted."""
        self._since = self._clock()
        self._told = FIRST_SECONDS
        self.try_soon()

    def try_soon(self) -> None:
        """Pause briefly again, because a job of this sweep has ended."""
        self.pause = FIRST_SECONDS
        self._due = self._clock() + self.pause

    def is_due(self) -> bool:
        return self._clock() >= self._due

    def go_on(self) -> float | None:
        """Wait on after a try in vain. Return the seconds since the beginning if they are to be told."""
        self.pause = min(2 * self.pause, MOST_SECONDS)
        self._due = self._clock() + self.pause
        waited = self._clock() - self._since
        if waited < 2 * self._told:
            return None
        self._told = waited
        return waited
