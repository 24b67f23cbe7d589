"""How often Slurm's commands, and the records on disk, are looked at."""

from __future__ import annotations

import secrets
import time

from launch.slurm.command import Unanswered, run

LEAST_SECONDS = 3.0
"""Between two calls of a command that answers at once."""
MOST_LOAD = 0.05
"""The share of the time that looking takes at most."""
MOST_SECONDS = 60.0
"""Between two calls of a command that fails."""


class SlurmCommand:
    """A Slurm command that is called again and again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = 0.0
        self._failures = 0
        self._since = ""
        self.separator = secrets.token_hex(8)
        """Between the values that it prints: no job's name contains it."""
        self.fault = ""
        """Since when it has not answered, and why; empty where it answers."""
        self.exists = True
        """False where it is not installed, or the site has switched off what it reads."""

    @property
    def due(self) -> bool:
        """Whether it may be called again."""
        return time.monotonic() >= self._next

    def ask(self, *arguments: str) -> str | None:
        """Return what it prints; None, with :attr:`fault`, where it does not answer."""
        begun = time.monotonic()
        try:
            answer = run(self._name, *arguments)
        except Unanswered as error:
            answer = None
            self._failures += 1
            self._since = self._since or time.strftime("%H:%M:%S")
            self.fault = f"{self._name} has not answered since {self._since} ({error})"
            self.exists = not error.for_good
        else:
            self._failures, self._since, self.fault = 0, "", ""
        self._next = time.monotonic() + poll_interval(time.monotonic() - begun, failures=self._failures)
        return answer


def poll_interval(spent: float, least: float = LEAST_SECONDS, failures: int = 0) -> float:
    """Return seconds to the next look, after one that took ``spent`` seconds and was the last of ``failures`` to fail."""
    if not failures:
        return max(least, spent / MOST_LOAD)
    return max(spent, min(MOST_SECONDS, least * 2.0 ** min(failures, 10)))
