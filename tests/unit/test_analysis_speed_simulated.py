"""The speed verdict held to account: simulated sweeps of known truth, from step times to the word."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from analysis.pair_speed import PairSpeed, Timed, together
from analysis.speedup import cell_speed
from analysis.steady import Window, window_of
from analysis.steps import Floats, Steps
from launch.spec import RunSpec

SWEEPS = 300
STEPS = 100
RUN_SPREAD = 0.005
"""Runs of one cell are half a percent apart, as on a GPU host; steps of a run a fifth of a percent."""


def run_of(random: np.random.Generator, mean_ms: float, kind: str, graphed: bool) -> Steps:
    level = np.exp(random.normal(0, RUN_SPREAD))
    times: Floats = mean_ms * level * (1 + random.normal(0, 0.002, STEPS))
    if kind == "hiccups":
        hit = random.random(STEPS) < 0.01
        times[hit] *= random.uniform(1.5, 10, int(hit.sum()))
    elif kind == "noisy":
        times *= np.exp(random.normal(0, 0.1, STEPS))
    elif kind == "drift":
        times *= 1 + np.linspace(0, 0.03, STEPS)
    elif kind == "settling" and not graphed:
        times[:15] *= 1.3
    elif kind == "stalls" and graphed:
        times[24::25] *= 3
    zeros = np.zeros(STEPS)
    return Steps(np.arange(STEPS), zeros, zeros, times, np.full(STEPS, 8), np.full(STEPS, "measure"))


def last_of_ten(true: float, slot: float) -> Counter[str]:
    """The words of a graphed cell that runs ten places after the eager run of its repeat, on a machine whose steps take
    ``slot`` longer, relative, with each run."""
    random = np.random.default_rng(5)
    found: Counter[str] = Counter()
    for _ in range(SWEEPS):
        pairs = []
        for first in range(0, 55, 11):
            eager = run_of(random, 20 * true * (1 + slot * first), "clean", False)
            window = window_of(eager, run_of(random, 20 * (1 + slot * (first + 10)), "clean", True))
            assert isinstance(window, Window)
            pairs.append(PairSpeed(timed=Timed(window, 8.0, np.zeros(0), 0.0, 60.0 * first, 60.0 * (first + 10))))
        speed = cell_speed(together(pairs), RunSpec())
        assert speed is not None
        found[speed.word] += 1
    return found


def test_a_machine_that_slows_down_steadily_does_not_make_graphs_slow() -> None:
    """Every pair is 2% apart, and so are consecutive eager runs."""
    assert last_of_ten(1.0, slot=0.002)["SLOWER"] <= 0.05 * SWEEPS


def test_drift_that_is_not_there_costs_no_verdict() -> None:
    assert last_of_ten(1.02, slot=0.0)["FASTER"] >= 0.9 * SWEEPS


def words(true: float, repeats: int, kind: str) -> Counter[str]:
    """The words of sweeps whose graphed steps are ``true`` times as fast."""
    random = np.random.default_rng(11)
    found: Counter[str] = Counter()
    for _ in range(SWEEPS):
        pairs = []
        for _ in range(repeats):
            window = window_of(run_of(random, 20 * true, kind, False), run_of(random, 20, kind, True))
            assert isinstance(window, Window)
            pairs.append(PairSpeed(timed=Timed(window, 8.0, np.zeros(0), 0.0)))
        speed = cell_speed(together(pairs), RunSpec())
        assert speed is not None
        found[speed.word] += 1
    return found


@pytest.mark.parametrize("kind", ["clean", "hiccups", "noisy", "drift", "settling"])
@pytest.mark.parametrize("repeats", [2, 4])
def test_a_step_that_is_not_faster_is_called_faster_as_rarely_as_the_interval_promises(kind: str, repeats: int) -> None:
    """2.5% on either side; 300 sweeps show 5% by chance once in a hundred times."""
    found = words(1.0, repeats, kind)
    assert found["FASTER"] <= 0.05 * SWEEPS
    assert found["SLOWER"] <= 0.05 * SWEEPS


@pytest.mark.parametrize(
    ("true", "repeats", "share"), [(1.1, 3, 0.95), (1.1, 2, 0.75), (1.02, 5, 0.9), (1 / 1.1, 3, 0.95)]
)
def test_a_difference_is_found_the_sooner_the_more_repeats(true: float, repeats: int, share: float) -> None:
    assert words(true, repeats, "clean")["FASTER" if true > 1 else "SLOWER"] >= share * SWEEPS


@pytest.mark.parametrize("true", [1.0, 1.05])
def test_stalls_of_graphed_runs_alone_are_never_taken_for_outliers(true: float) -> None:
    """Every 25th step takes three times as long: 8% in all, more than the 5% that the other steps gain."""
    assert words(true, 3, "stalls")["FASTER"] == 0
