"""Test growth at the end of the window on constructed curves: growth that will leave the margin does not pass, and
chaos does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from analysis.records.steps import Floats
from analysis.verdict.curve_difference import Sample
from analysis.verdict.curve_tests.drift import drift_of_run
from analysis.verdict.curve_tests.growth import Growth, late_growth
from benchmarks.verdicts import COMPARED, Setting, noise_of

STEPS = np.arange(COMPARED)
LEFT = COMPARED - 1 - STEPS
TRIALS = 40


def growth(noise: Floats, offset: Floats | float = 0.0) -> Growth | None:
    """Judge two eager runs and further graphed runs with ``noise`` of shape (runs, steps). ``offset`` is added to the
    graphed runs."""
    mean = noise[:2].mean(axis=0)
    sample = Sample("loss", noise[:2] - mean, noise[2:] + offset - mean, noise[:0])
    return late_growth(sample.graphed, sample.eager_distances, 1.0) or drift_of_run(sample, 1.0)


def share(offset: Floats | float, noise: Callable[[np.random.Generator], Floats]) -> float:
    """Return the share of trials with growth that leaves the margin."""
    random = np.random.default_rng(6)
    return sum(growth(noise(random), offset) is not None for _ in range(TRIALS)) / TRIALS


def correlated(size: float, correlation: float, graphed: int = 2) -> Callable[[np.random.Generator], Floats]:
    setting = Setting(noise=size, correlation=correlation, graphed=graphed)
    return lambda random: noise_of(random, setting)[0, :, -COMPARED:]


def ramp(steps: int, end: float) -> Floats:
    return np.maximum(0, 1 - LEFT / steps) * end


def doubling(steps: int, end: float) -> Floats:
    """Return a curve that doubles every ``steps`` steps and ends at ``end``."""
    return end * 0.5 ** (LEFT / steps)


@pytest.mark.parametrize(
    "offset",
    [ramp(20, 0.55), ramp(10, 0.5), ramp(60, 0.55), doubling(2, 0.45), doubling(8, 0.4), doubling(33, 0.4)],
    ids=["ramp-20", "ramp-10", "ramp-60", "doubling-2", "doubling-8", "doubling-33"],
)
@pytest.mark.parametrize("graphed", [1, 2])
def test_growth_that_will_leave_the_margin_is_found(offset: Floats, graphed: int) -> None:
    assert share(offset, correlated(0.01, 0.0, graphed)) >= 0.95
    assert share(offset, correlated(0.01, 0.9, graphed)) >= 0.85
    assert growth(np.zeros((2 + graphed, COMPARED)), offset)


def test_growth_is_found_in_a_long_window_and_in_one_of_several_runs() -> None:
    noise = np.random.default_rng(3).normal(0, 0.01, (4, 3000))
    offset = np.zeros((2, 3000))
    offset[1] = 0.45 * 0.5 ** (np.arange(3000)[::-1] / 2)
    found = growth(noise, offset)
    assert found is not None and found.steps < 20 and found.after > 3 * found.before
    assert growth(noise) is None


@pytest.mark.parametrize("factor", [1.9, 4.0, 100.0])
@pytest.mark.parametrize("noise", [1e-5, 0.05])
def test_growth_in_each_of_the_last_steps_is_found(factor: float, noise: float) -> None:
    assert share(0.6 * factor**-LEFT, correlated(noise, 0.0)) >= 0.95


@pytest.mark.parametrize("period", [2.0, 7.3, 19.0])
def test_an_oscillation_that_grows_is_found_in_one_run_of_two(period: float) -> None:
    wave = np.sin(2 * np.pi * STEPS / period + 0.7)
    one = np.array([[0.0], [0.85]]) * wave / np.abs(wave).max() * STEPS / COMPARED
    assert share(one, correlated(0.05, 0.0)) >= 0.95
    assert share(one, correlated(0.05, 0.9)) >= 0.85
    assert share(one[:, ::-1], correlated(0.05, 0.0)) <= 0.05, "what fades does not leave"


def test_an_oscillation_that_grows_averages_out_noise_that_changes_slowly() -> None:
    one = (np.arange(10) == 7)[:, None] * 0.85 * np.sin(2 * np.pi * STEPS / 7.3) * STEPS / COMPARED
    assert share(one, correlated(0.1, 0.9, graphed=10)) >= 0.8


@pytest.mark.parametrize("period", [5, 10, 20, 25])
@pytest.mark.parametrize("size", [0.8 * STEPS / COMPARED, doubling(20, 0.5)], ids=["ramp", "doubling"])
def test_growth_in_every_nth_step_alone_is_found(period: int, size: Floats) -> None:
    assert share(size * (STEPS % period == period - 1), correlated(0.01, 0.9)) >= 0.95


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_a_drift_of_one_run_of_ten_is_found_and_named(correlation: float) -> None:
    one = (np.arange(10) == 7)[:, None] * np.linspace(0, 0.75, COMPARED)
    assert share(one, correlated(0.02, correlation, graphed=10)) >= (0.85 if correlation else 0.95)
    assert share(one / 2, correlated(0.01, correlation, graphed=10)) <= 0.1, "it stays within the margin"
    found = growth(np.zeros((12, COMPARED)), one)
    assert found is not None and (found.run, found.steps) == (7, COMPARED)


def test_a_transient_after_the_capture_does_not_hide_later_growth() -> None:
    assert share(0.5 * 0.7**STEPS + doubling(2, 0.5), correlated(0.01, 0.0)) >= 0.95


@pytest.mark.parametrize(("size", "correlation"), [(0.01, 0.0), (0.25, 0.0), (0.15, 0.9)])
@pytest.mark.parametrize("graphed", [1, 2])
def test_noise_is_not_growth(size: float, correlation: float, graphed: int) -> None:
    assert share(0.0, correlated(size, correlation, graphed)) <= 0.05
    assert share(0.3, correlated(size, correlation, graphed)) <= 0.05, "nor is a constant difference"


@pytest.mark.parametrize("size", [0.01, 0.3])
def test_noise_of_graphed_runs_beside_equal_eager_ones_is_not_growth(size: float) -> None:
    only_graphed = np.array([[0.0], [0.0], [1.0], [1.0]])
    assert share(0.0, lambda random: only_graphed * random.normal(0, size, (4, COMPARED))) <= 0.05


@pytest.mark.parametrize("units", [0.4, 0.6, 1.0, 2.0])
def test_differences_of_few_units_of_float32_beside_equal_eager_runs_are_not_growth(units: float) -> None:
    """Most losses are then equal, and the differences of others are whole units, of 0.00024 margins each."""
    unit = np.array([[0.0], [0.0], [1.0], [1.0]]) * 2**-22 / 1e-3
    assert share(0.0, lambda random: unit * random.normal(0, units, (4, COMPARED)).round()) <= 0.05


@pytest.mark.parametrize("steps", [8, 16, 33, 60])
@pytest.mark.parametrize("kind", ["white", "correlated", "smooth"])
def test_growth_that_eager_runs_show_as_well_does_not_count(steps: int, kind: str) -> None:
    def chaos(random: np.random.Generator) -> Floats:
        """Return runs that diverge from each other at one rate. Their signs change from step to step, or their paths are smooth."""
        factors = {
            "white": random.normal(size=(4, COMPARED)),
            "correlated": correlated(1.0, 0.9)(random),
            "smooth": random.normal(size=(4, 1)),
        }[kind]
        return factors * doubling(steps, 0.15) + 1e-3 * random.normal(size=(4, COMPARED))

    assert share(0.0, chaos) <= 0.1
