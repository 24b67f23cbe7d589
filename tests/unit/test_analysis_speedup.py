"""Speed-up words, and the pairs a ratio is read from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.compare import compare
from analysis.load import load
from analysis.speedup import Speed, speed_word
from tests.records import AttemptRecord, write_sweep

EAGER_MS = 20.0


def timed(root: Path, graphed_ms: Callable[[AttemptRecord], float]) -> Optional[Speed]:
    """The speed of a sweep whose steps all take ``EAGER_MS`` eager and ``graphed_ms`` graphed."""

    def edit(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = graphed_ms(run) if run.spec.graphed else EAGER_MS

    return compare(load(write_sweep(root, edit=edit)))[1].speed


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ([1.34], "INCONCLUSIVE"),
        ([1.34, 1.31], "FASTER"),
        ([0.9, 0.98], "SLOWER"),
        ([1.0, 1.005], "NEUTRAL"),
        ([1.01, 0.99], "NEUTRAL"),
        ([1.34, 1.005], "INCONCLUSIVE"),
        ([1.02, 0.98], "INCONCLUSIVE"),
        ([float("nan"), 1.2], "INCONCLUSIVE"),
    ],
)
def test_words(ratios: list[float], word: str) -> None:
    assert speed_word(ratios) == word


@given(st.lists(st.floats(0.1, 10), min_size=2))
def test_a_word_holds_for_every_pair(ratios: list[float]) -> None:
    word = speed_word(ratios)
    assert (word == "FASTER") == (min(ratios) > 1.01)
    assert (word == "SLOWER") == (max(ratios) < 0.99)


def test_the_figure_is_the_median_ratio_with_its_range(tmp_path: Path) -> None:
    speed = timed(tmp_path, lambda run: 16.0 if run.spec.repeat else 15.0)
    assert speed is not None
    assert speed.summary == "1.29x (1.25-1.33 over 2 pairs)"
    assert speed.word == "FASTER"


def test_only_measured_steps_count(tmp_path: Path) -> None:
    def late_warmup(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = EAGER_MS if step["phase"] == "measure" else 9e9

    speed = compare(load(write_sweep(tmp_path, edit=late_warmup)))[1].speed
    assert speed is not None
    assert (speed.low, speed.high, speed.word) == (1.0, 1.0, "NEUTRAL")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_step_time_that_is_no_time_gives_no_ratio(tmp_path: Path, bad: float) -> None:
    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.metrics[60]["step_time_ms"] = bad

    result = compare(load(write_sweep(tmp_path, edit=edit)))[1]
    assert result.speed is None
    assert result.pairs[0].speed.reason == "a step time is not a positive number"
