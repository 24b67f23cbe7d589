"""The calibration of verdicts: a small part of the simulation, and that docs/verdicts.md holds what the whole of it says."""

from __future__ import annotations

import re

import numpy as np
import pytest

from analysis.verdict.curve_difference import Sample
from analysis.verdict.equivalence_test import estimate_of, holm, mean_within
from analysis.verdict.verdict import PASSES
from benchmarks.verdicts import (
    BEGIN,
    DEFECTS,
    DOCUMENT,
    END,
    Setting,
    defect_row,
    digest,
    noise_of,
    passed,
    power_row,
    words,
)


@pytest.mark.parametrize("kind", DEFECTS)
@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_a_defect_of_twice_the_margin_does_not_pass(kind: str, noise: float) -> None:
    for hit in (1, 2):
        found = words(Setting(kind, noise, hit=hit), 25)
        assert not any(found[word] for word in PASSES), f"{found}, in {hit} of 2 graphed runs"


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_noise_of_a_tenth_of_the_margin_passes_and_noise_alone_never_diverges(correlation: float) -> None:
    assert passed(words(Setting(noise=0.1, correlation=correlation), 60)) >= 0.9
    for noise in (1.0, 10.0):
        assert set(words(Setting(noise=noise, correlation=correlation), 40)) == {"INCONCLUSIVE"}


def test_the_document_holds_what_the_simulation_prints() -> None:
    written = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    assert f"Parameters {digest()}.\n" in written, "run python benchmarks/verdicts.py --write"
    for row in (power_row(0.3), *map(defect_row, ("NaN", "truncation", "renumbered steps"))):
        assert f"{row}\n" in written, "run python benchmarks/verdicts.py --write"
    assert set(re.findall(r"^\| ([^|]+?) \|", written, flags=re.MULTILINE)) >= set(DEFECTS)


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
        sample = Sample("loss", noise[:2] - noise[:2].mean(axis=0), noise[2:] - noise[:2].mean(axis=0) + 1)
        held += mean_within(sample, 1.0)[1] <= 0.05
        found = estimate_of(sample, weights)
        covered += abs(found.value - 1) <= found.half_width
    assert held / 400 <= 0.05
    assert covered / 400 >= 0.9


def test_no_noise_leaves_an_interval_of_nothing() -> None:
    line = np.linspace(0.1, 0.2, 100)
    mean, p = mean_within(Sample("loss", np.zeros((2, 100)), np.stack([line, line])), 1.0)
    assert mean.value == pytest.approx(0.15)
    assert (mean.half_width, p) == (0.0, 0.0)
    assert mean_within(Sample("loss", np.zeros((2, 100)), np.stack([line])), 0.15)[1] == 1.0


def test_of_several_tests_each_is_held_against_its_share_of_alpha() -> None:
    assert holm([0.04]) == (True,)
    assert holm([0.04, 0.01]) == (True, True)
    assert holm([0.04, 0.03]) == (False, False)
    assert holm([0.024, float("nan"), 0.01]) == (True, False, True)
    assert holm([]) == ()
