"""How long an attempt is watched before it is ended, by a clock handed in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.contract.paths import AttemptPaths
from launch.contract.plan import Limits
from launch.failures.diagnose import EndedBy
from launch.supervise import attempt

LIMITS = Limits(run_seconds=100.0, hang_seconds=50.0)


class Clock:
    """Each look takes 0.1 s; at some looks the whole job was suspended before it."""

    def __init__(self, suspended: dict[int, float]) -> None:
        self.now = 1000.0
        self._looks = 0
        self._suspended = suspended

    def sleep(self, seconds: float) -> None:
        self._looks += 1
        self.now += seconds + self._suspended.get(self._looks, 0.0)

    def monotonic(self) -> float:
        return self.now


class Silent:
    """Ranks that end by themselves after so many looks, and write nothing."""

    def __init__(self, looks: int) -> None:
        self._left = looks

    def poll(self) -> int | None:
        self._left -= 1
        return 0 if self._left < 0 else None


@pytest.mark.parametrize(
    ("looks", "suspended", "ended_by"),
    [
        (400, {}, "itself"),
        (600, {}, "hang"),
        (400, {200: 3600.0}, "itself"),
        (400, {100: 40.0, 200: 40.0, 300: 40.0}, "itself"),
        (1100, {400: 1000.0, 800: 1000.0}, "deadline"),
        (900, {100: 1000.0}, "hang"),
    ],
)
def test_time_in_which_nothing_ran_counts_for_no_limit(
    looks: int, suspended: dict[int, float], ended_by: EndedBy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(suspended)
    monkeypatch.setattr(attempt, "time", SimpleNamespace(sleep=clock.sleep, monotonic=clock.monotonic))
    ended = attempt._watch(AttemptPaths(tmp_path), Silent(looks), LIMITS, lambda: None)  # type: ignore[arg-type]
    assert ended == ended_by
