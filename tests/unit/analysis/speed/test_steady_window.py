"""Test the steady window: it drops settling steps and outliers, but keeps the run's own behaviour."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.records.steps import Floats, Steps
from analysis.speed.steady_window import FENCE, LONGEST_SETTLING, NOTICEABLE, Window, behaviour, window_of

STEPS = 100


def steps_of(times: Floats, first: int = 0, phase: str = "measure") -> Steps:
    count = len(times)
    zeros = np.zeros(count)
    return Steps(np.arange(first, first + count), zeros, zeros, times, np.full(count, 8), np.full(count, phase))


def steady(count: int = STEPS, seed: int = 0) -> Floats:
    """Return the steps of a GPU: 20 ms each, a tenth of a percent apart."""
    times: Floats = 20.0 * (1 + np.random.default_rng(seed).normal(0, 1e-3, count))
    return times


def window(eager: Floats, graphed: Floats | None = None) -> Window:
    found = window_of(steps_of(eager), steps_of(steady(len(eager), 1) if graphed is None else graphed))
    assert isinstance(found, Window)
    return found


def test_a_clean_window_is_left_whole() -> None:
    found = window(steady())
    assert (len(found), found.settling, int(found.excluded_steps.sum()), behaviour([found])) == (STEPS, 0, 0, "")


def test_only_steps_measured_on_both_sides_count_and_by_their_numbers() -> None:
    found = window_of(steps_of(np.arange(1.0, 11.0)), steps_of(np.arange(1.0, 11.0), first=4))
    assert isinstance(found, Window)
    assert found.eager_ms.tolist() == [5, 6, 7, 8, 9, 10]
    assert found.graphed_ms.tolist() == [1, 2, 3, 4, 5, 6]
    assert window_of(steps_of(steady()), steps_of(steady(), phase="settle")) == "no step was measured in both runs"


def test_a_run_does_not_choose_what_is_measured() -> None:
    chosen = steps_of(steady())
    chosen.phase[51::2] = "settle"
    assert window_of(steps_of(steady()), chosen) == "steps of another phase lie among the measured ones"
    chosen.phase[:] = ["settle"] * 70 + ["measure"] * 30
    reason = "the eager run has 0 steps of phase settle, but the graphed run has 70"
    assert window_of(steps_of(steady()), chosen) == reason


@pytest.mark.parametrize("count", [1, 10, 25])
def test_settling_goes_up_to_a_quarter(count: int) -> None:
    times = steady()
    times[:count] *= 1.5
    found = window(times)
    assert (found.settling, len(found), behaviour([found])) == (count, STEPS - count, "")


def test_a_longer_slow_beginning_is_how_the_run_behaves() -> None:
    times = steady()
    times[: int(LONGEST_SETTLING * STEPS) + 1] *= 1.5
    found = window(times)
    assert (found.settling, len(found)) == (0, STEPS)
    assert behaviour([found]) == "26 of 100 steps of one eager run are far from their median"


def test_hiccups_of_both_sides_are_outliers() -> None:
    one, other = steady(), steady(seed=1)
    one[[30, 60]] *= 3
    other[[31, 70]] *= 3
    found = window(one, other)
    assert (int(found.excluded_steps.sum()), behaviour([found])) == (4, "")


def test_a_step_within_the_noise_of_its_run_is_not_off_however_quiet_the_run() -> None:
    times = np.full(STEPS, 20.0)
    times[50] *= 1 + NOTICEABLE * 0.99
    assert not window(times).excluded_steps.any()
    noisy = 20.0 + np.linspace(-5, 5, STEPS)  # The median of the deviations is 2.5.
    noisy[50] = 20.0 + FENCE * 1.4826 * 2.4
    assert not window(noisy).excluded_steps.any()


def test_two_modes_of_a_half_each_are_all_kept() -> None:
    times = steady()
    times[::2] *= 2
    found = window(steady(), times)
    kept = times if behaviour([found]) else times[~found.excluded_steps]
    assert kept.mean() == pytest.approx(30, rel=0.01)


@given(st.integers(0, 100), st.integers(2, 50), st.floats(1.1, 20), st.integers(1, 4))
def test_the_mean_is_never_far_from_the_whole_runs_where_one_side_alone_is_slow(
    seed: int, every: int, slower: float, repeats: int
) -> None:
    """Slow steps that recur on one side alone are left out only if chance makes as many, over all pairs."""
    windows = []
    for repeat in range(repeats):
        times = steady(seed=seed + repeat)
        times[every - 1 :: every] *= slower
        windows.append(window(steady(seed=99), times))
    left_out = sum(int(w.excluded_steps.sum()) for w in windows)
    if not behaviour(windows):
        assert left_out <= 5


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=60), st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=60))
def test_any_times_leave_steps_that_count(one: list[float], other: list[float]) -> None:
    found = window_of(steps_of(np.array(one)), steps_of(np.array(other)))
    assert isinstance(found, Window)
    assert len(found) + found.settling == min(len(one), len(other))
    kept = len(found) if behaviour([found]) else int((~found.excluded_steps).sum())
    assert kept > 0
