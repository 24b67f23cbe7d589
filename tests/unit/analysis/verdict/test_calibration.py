"""Test the calibration of verdicts: repeat a small part of the simulation, and check that docs/verdicts.md has the
results of the whole."""

from __future__ import annotations

import math
import re
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest

from analysis.verdict.curve_difference import Sample
from analysis.verdict.curve_tests.equivalence_test import estimate_of, mean_within
from analysis.verdict.curve_tests.step_test import TOLERATED, find_hidden
from analysis.verdict.family import holm
from analysis.verdict.judge_curves import judge_curves
from analysis.verdict.noise import noise_scale
from analysis.verdict.verdict import VerdictName
from benchmarks.verdicts import (
    BEGIN,
    CAPTURE,
    COMPARED,
    DEFECTS,
    DOCUMENT,
    END,
    GROWING,
    GROWN,
    LONG,
    MARGINS,
    QUANTILE,
    SHAPES,
    Setting,
    curve,
    defect_row,
    digest,
    noise_of,
    passed,
    shape_row,
    with_defect,
    words,
)
from tests.pairwise import each_once

EXHAUSTIVE = pytest.mark.exhaustive
NO_RUN = np.empty((0, 100))
"""There is no perturbed run."""


@pytest.mark.parametrize(("kind", "noise"), each_once(EXHAUSTIVE, DEFECTS, [0.1, 0.25, 0.5]))
def test_a_defect_of_one_and_a_quarter_margins_does_not_pass(kind: str, noise: float) -> None:
    found = sum((words(setting, 5) for setting in with_defect(kind, noise)), Counter[VerdictName]())
    assert passed(found) <= 0.1, f"{found}, and 5% are right"


@pytest.mark.parametrize("steps", [COMPARED, LONG])
@pytest.mark.parametrize("graphed", [1, 2])
def test_white_noise_of_a_quarter_of_the_margin_passes(steps: int, graphed: int) -> None:
    if steps == COMPARED or graphed > 1:
        assert passed(words(Setting(noise=0.25, correlation=0.0, compared=steps, graphed=graphed), 60)) >= 0.95


@pytest.mark.parametrize("shape", SHAPES)
def test_noise_of_any_shape_passes_whose_largest_differences_are_half_the_margin(shape: str) -> None:
    assert passed(words(Setting(shape=shape, noise=QUANTILE), 60)) >= 0.9


def test_no_test_passes_a_single_run_of_slow_noise_as_often_as_the_document_asks_of_two() -> None:
    """The run's own shift, of size s, may move a true mean of one margin to within ``limit``. With the worst s, this
    happens in 5% of runs."""
    normal, limit, steps = NormalDist(), 0.103, np.arange(COMPARED)
    worst = math.sqrt(limit / math.atanh(limit))
    assert normal.cdf((1 + limit) / worst) - normal.cdf((1 - limit) / worst) == pytest.approx(0.05, abs=5e-4)
    scale = QUANTILE / math.sqrt(2) / normal.inv_cdf(0.9995)
    precision = np.linalg.inv(0.98 ** np.abs(steps[:, None] - steps)).sum() / scale**2
    within = 2 * normal.cdf(limit * math.sqrt(precision)) - 1
    assert within**2 == pytest.approx(0.68, abs=0.005)
    said = f"within {limit} margins. Without a defect, both metrics stay within this bound in only {within**2:.0%} of cases,"
    assert said in " ".join(DOCUMENT.read_text().split())


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize(("graphed", "hit"), [(2, 2), (10, 1)])
def test_what_will_leave_the_margin_after_the_window_does_not_pass(kind: str, graphed: int, hit: int) -> None:
    found = words(Setting(kind, 0.05, 0.0, GROWN, graphed=graphed, hit=hit), 20)
    assert passed(found) <= 0.1, f"{found}, and 5% are right"


@pytest.mark.parametrize(("probability", "graphed"), [(0.005, 1), (0.005, 2), (0.02, 2)])
def test_rare_spikes_of_both_sides_are_not_divergence(probability: float, graphed: int) -> None:
    found = words(Setting(noise=0.1, graphed=graphed, shape=probability), 60)
    assert found["DIVERGED"] <= 1, f"{found}, and 1% is right"


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_noise_alone_never_diverges(correlation: float) -> None:
    for noise in (1.0, 10.0):
        assert set(words(Setting(noise=noise, correlation=correlation), 40)) == {"INCONCLUSIVE"}


def test_the_document_holds_what_the_simulation_prints() -> None:
    written = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    assert f"Digest of the simulations' settings: {digest()}.\n" in written, "run python benchmarks/verdicts.py --write"
    for row in map(defect_row, ("NaN", "truncation", "renumbered steps")):
        assert f"{row}\n" in written, "run python benchmarks/verdicts.py --write"
    assert set(re.findall(r"^\| ([^|]+?) \|", written, flags=re.MULTILINE)) >= {*DEFECTS, *GROWING, *SHAPES}


@pytest.mark.slow
def test_the_document_holds_what_the_simulation_prints_of_noise() -> None:
    assert f"{shape_row('uniform')}\n" in DOCUMENT.read_text(), "run python benchmarks/verdicts.py --write"


def test_the_noise_is_what_it_says() -> None:
    random, setting = np.random.default_rng(1), Setting(noise=0.5, correlation=0.9)
    drawn = np.stack([noise_of(random, setting) for _ in range(400)])
    difference = drawn[:, :, 0] - drawn[:, :, 2]
    assert np.std(difference) == pytest.approx(0.5, rel=0.05)
    assert np.std(difference[..., -1]) == pytest.approx(0.5, rel=0.1)
    correlation = np.corrcoef(difference[..., 1:].ravel(), difference[..., :-1].ravel())[0, 1]
    assert correlation == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("correlation", "graphed"), [(0.0, 2), (0.9, 2), (0.9, 1)])
def test_a_mean_at_its_margin_passes_no_oftener_than_alpha(correlation: float, graphed: int) -> None:
    random, weights = np.random.default_rng(2), np.full(100, 0.01)
    setting, held, covered = Setting(noise=0.3, correlation=correlation, graphed=graphed), 0, 0
    for _ in range(400):
        noise = noise_of(random, setting)[0, :, -100:]
        sample = Sample("loss", noise[:2] - noise[:2].mean(axis=0), noise[2:] - noise[:2].mean(axis=0) + 1, NO_RUN)
        held += mean_within(sample, 1.0)[1] <= 0.05
        found = estimate_of(sample, weights)
        covered += abs(found.value - 1) <= found.half_width
    assert held / 400 <= 0.05
    assert covered / 400 >= 0.9


def test_equal_eager_runs_do_not_narrow_the_interval_of_graphed_ones() -> None:
    """Each graphed run has its own offset, of any size, and their true mean is at the margin. Eager runs add no
    variance."""
    random, held = np.random.default_rng(4), 0
    for _ in range(400):
        graphed = np.ones((2, 100)) + random.normal(0, 0.4, (2, 1))
        held += mean_within(Sample("loss", np.zeros((5, 100)), graphed, NO_RUN), 1.0)[1] <= 0.05
    assert held / 400 <= 0.06


@pytest.mark.parametrize(
    ("noise", "runs"), each_once(EXHAUSTIVE, [0.05, 0.2, 0.3, 0.6], [(1, 1), (2, 1), (2, 2), (4, 3)])
)
def test_noise_hides_one_bad_step_in_one_of_twenty_windows_at_most(noise: float, runs: tuple[int, int]) -> None:
    """``runs`` are the graphed runs, and those of them that have the bad step."""
    graphed, hit = runs
    random, setting, missed = np.random.default_rng(3), Setting(noise=noise, correlation=0.0, graphed=graphed), 0
    for _ in range(200):
        drawn = noise_of(random, setting)[0, :, -COMPARED:]
        drawn[2 : 2 + hit, random.integers(COMPARED)] += TOLERATED
        mean = drawn[:2].mean(axis=0)
        sample = Sample("loss", drawn[:2] - mean, drawn[2:] - mean, NO_RUN)
        missed += find_hidden(sample, noise_scale(sample), 1.0) is None
    assert missed / 200 <= 0.07, "4% are right"


@pytest.mark.parametrize("steps", [COMPARED, pytest.param(LONG, marks=EXHAUSTIVE)])
def test_noise_that_is_loud_at_the_start_hides_no_bad_step_there(steps: int) -> None:
    """A single graphed run, whose noise is five times as large in the first 20 steps."""
    random, missed = np.random.default_rng(3), 0
    for _ in range(200):
        runs = random.normal(0, 0.05 / math.sqrt(2), (3, steps)) * np.where(np.arange(steps) < 20, 5, 1)
        runs[2, random.integers(20)] += TOLERATED
        mean = runs[:2].mean(axis=0)
        sample = Sample("loss", runs[:2] - mean, runs[2:] - mean, NO_RUN[:, :1].repeat(steps, axis=1))
        missed += find_hidden(sample, noise_scale(sample), 1.0) is None
    assert missed / 200 <= 0.07, "4% are right"


def equal_runs(random: np.random.Generator, spikes: float, defect: float) -> VerdictName:
    """Return the verdict on two equal eager runs, a perturbed one, and two equal graphed runs with a ``defect`` at one step."""
    drawn = noise_of(random, Setting(noise=0.2, correlation=0.0, graphed=1, shape=spikes))
    drawn[:, :, : CAPTURE + 1] = 0
    drawn[0, 2, CAPTURE + 1 + random.integers(COMPARED)] += defect
    eager, perturbed, graphed = (curve(drawn[:, run]) for run in range(3))
    sides = {"eager 0": eager, "eager 1": eager}, {"graphed 0": graphed, "graphed 1": graphed}
    expected = np.arange(CAPTURE + 1 + COMPARED)
    return judge_curves(*sides, expected, CAPTURE + 1, MARGINS, perturbed=perturbed, learnt=True).verdict


def test_equal_graphed_runs_have_one_noise() -> None:
    """Their spikes are no divergence, and their noise hides no bad step."""
    random = np.random.default_rng(6)
    spiked = Counter(equal_runs(random, 0.005, 0.0) for _ in range(100))
    assert spiked["DIVERGED"] <= 1, f"{spiked}; a fourth of them, if each run counts"
    hidden = Counter(equal_runs(random, 0.0, TOLERATED) for _ in range(200))
    assert passed(hidden) <= 0.07, f"{hidden}; one of eight, if each run counts"


def test_of_several_looks_each_allows_less_noise_at_a_step() -> None:
    random, setting = np.random.default_rng(3), Setting(noise=0.25, correlation=0.0)
    runs = noise_of(random, setting)[0, :, -COMPARED:]
    mean = runs[:2].mean(axis=0)
    sample = Sample("loss", runs[:2] - mean, runs[2:] - mean, NO_RUN)
    at_limit = next(
        size for size in np.linspace(0.2, 1.5, 500) if not find_hidden(sample, noise_scale(sample), float(size))
    )
    assert find_hidden(sample, noise_scale(sample), float(at_limit), looks=3) is not None


def test_huge_differences_have_a_noise_scale() -> None:
    sample = Sample("loss", np.array([[-1e300] * 100, [1e300] * 100]), np.full((1, 100), 1e300), NO_RUN)
    assert find_hidden(sample, noise_scale(sample), 1.0) is not None


def test_no_noise_leaves_an_interval_of_nothing() -> None:
    line = np.linspace(0.1, 0.2, 100)
    mean, p = mean_within(Sample("loss", np.zeros((2, 100)), np.stack([line, line]), NO_RUN), 1.0)
    assert mean.value == pytest.approx(0.15)
    assert (mean.half_width, p) == (0.0, 0.0)
    assert mean_within(Sample("loss", np.zeros((2, 100)), np.stack([line]), NO_RUN), 0.15)[1] == 1.0


def test_of_several_tests_each_is_held_against_its_share_of_alpha() -> None:
    assert holm([0.04]) == (True,)
    assert holm([0.04, 0.01]) == (True, True)
    assert holm([0.04, 0.03]) == (False, False)
    assert holm([0.024, float("nan"), 0.01]) == (True, False, True)
    assert holm([]) == ()
