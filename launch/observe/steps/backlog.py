"""What hooks have read and the observer has not processed yet, in order.

A step evicts the observer's code from the CPU's caches, so any line of it takes several times as long in a program as in a loop.
Hooks therefore only read, and many readings are processed together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from time import perf_counter
from typing import Any

from launch.contract.errors import OrchestratorError

SECONDS = 1.0
"""How long readings wait while hooks are called. A killed process loses them."""
MOST = 256
"""How many readings wait at most. They hold pinned memory and printed lines."""


class Backlog:
    """Calls that wait, if they may."""

    __slots__ = ("_calls", "_due", "_lock", "may_wait")

    def __init__(self) -> None:
        self.may_wait = False
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._due = 0.0
        self._lock = Lock()

    def add(self, now: float, call: Callable[..., None], *arguments: Any) -> bool:
        """Add a call ``now``. Return whether the backlog is due."""
        self._calls.append((call, arguments))
        return not self.may_wait or now >= self._due or len(self._calls) >= MOST

    def process(self, finish: Callable[[], None]) -> None:
        """Make the calls that wait, then ``finish``. Do nothing within a call, or while another thread processes them.

        If a call raises an error of ours, the calls after it go on waiting. Any other exception, for example of a signal handler,
        may interrupt a call. What follows would then be taken for other steps, so it is dropped, now and later.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self._calls:
                call, arguments = self._calls.popleft()
                call(*arguments)
        except OrchestratorError:
            raise
        except BaseException:
            self._calls = deque(maxlen=0)
            raise
        finally:
            try:
                finish()
            finally:
                self._due = perf_counter() + SECONDS
                self._lock.release()
