"""Test how long an attempt is watched before it is ended, with a simulated clock."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.contract.outcomes import read_outcome
from launch.contract.paths import AttemptPaths
from launch.contract.plan import Limits
from launch.failures.diagnose import Diagnosis, EndedBy, Evidence, RankExit
from launch.supervise import attempt, compilers

LIMITS = Limits(run_seconds=100.0, hang_seconds=50.0)


class Clock:
    """Let each look take 0.1 s. Before some looks, the whole job was suspended."""

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
    """Ranks that end by themselves after this number of looks, and write nothing."""

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


class Loading(Silent):
    """Ranks that print, and begin to train at some look."""

    def __init__(self, looks: int, paths: AttemptPaths, first_step: int) -> None:
        super().__init__(looks)
        self._paths, self._first_step = paths, first_step

    def poll(self) -> int | None:
        with self._paths.log(0).open("a") as log:
            log.write("loading shard\n")
        if self._left == self._first_step:
            self._paths.metrics.write_text("{}\n")
        return super().poll()


@pytest.mark.parametrize(("first_step", "ended_by"), [(0, "itself"), (600, "hang")])
def test_what_a_program_prints_is_a_sign_of_life_until_its_first_step(
    first_step: int, ended_by: EndedBy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between steps, a program that waits forever may print too."""
    clock, paths = Clock({}), AttemptPaths(tmp_path)
    paths.logs.mkdir()
    monkeypatch.setattr(attempt, "time", SimpleNamespace(sleep=clock.sleep, monotonic=clock.monotonic))
    assert attempt._watch(paths, Loading(700, paths, first_step), LIMITS, lambda: None) == ended_by  # type: ignore[arg-type]


class Crashed:
    """Rank 0 appears to end first, although it was ended because rank 1 crashed."""

    def poll(self) -> int:
        return -15

    def exits(self) -> tuple[RankExit, ...]:
        return RankExit(0, -15, 2.0), RankExit(1, -11, 1.0)

    def ask_scheduler(self, evidence: Evidence) -> Evidence:
        return evidence

    def print_stacks(self) -> None:
        raise AssertionError

    def end(self) -> None: ...

    def where(self, diagnosis: Diagnosis) -> str:
        return ""


def test_the_exit_code_is_that_of_the_rank_that_is_blamed(tmp_path: Path) -> None:
    paths = AttemptPaths(tmp_path / "runs" / "r" / "attempts" / "1")
    paths.root.mkdir(parents=True)
    attempt.run_attempt(paths, Crashed(), LIMITS, "b", lambda: None)
    outcome = read_outcome(paths)
    assert outcome is not None and (outcome.failure_class, outcome.rank, outcome.exit_code) == ("SIGSEGV", 1, -11)


@pytest.mark.parametrize(("steps", "ended_by"), [(False, "itself"), (True, "hang")])
def test_compilers_that_work_are_a_sign_of_life_until_the_first_step(
    steps: bool, ended_by: EndedBy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, paths = Clock({}), AttemptPaths(tmp_path)
    if steps:
        paths.metrics.write_text("{}\n")
    monkeypatch.setattr(attempt, "time", SimpleNamespace(sleep=clock.sleep, monotonic=clock.monotonic))
    monkeypatch.setattr(compilers, "compiler_seconds", lambda ancestor: clock.now)
    assert attempt._watch(paths, Silent(700), LIMITS, lambda: None) == ended_by  # type: ignore[arg-type]
