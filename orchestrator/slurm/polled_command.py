"""A Slurm command that is called repeatedly, and less often if it is slow or fails."""

from __future__ import annotations

import secrets
import time

from launch.common.poll_interval import poll_interval
from launch.slurm.command import Unanswered, run


class PolledCommand:
    """A Slurm command that is called repeatedly."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = 0.0
        self._failures = 0
        self._since = ""
        self.separator = secrets.token_hex(8)
        """The separator between printed values. No job's name contains it."""
        self.fault = ""
        """Since when the command has not answered, and why. Empty if it answers."""
        self.exists = True
        """Whether the command can answer. False if it is not installed or the site has disabled what it reads."""

    @property
    def due(self) -> bool:
        """Whether the command may be called again."""
        return time.monotonic() >= self._next

    def ask(self, *arguments: str) -> str | None:
        """Return what the command prints. If it does not answer, return None and set :attr:`fault`."""
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
