"""Test gradients of the first replays: a wrong gradient is named, but rounding, noise and an earlier difference are no
fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from analysis.pairing.first_replay import check_first_replay
from launch.contract.records.gradient_sketch import PROJECTIONS, GradientSketch

STEPS, CAPTURED, SIZE = range(6), 3, 2000
NAMES = ("layer.weight", "layer.bias", "query.weight", "key.bias")
SCALES = {"layer.weight": 1.0, "layer.bias": 0.1, "query.weight": 1e-3, "key.bias": 1e-6}
"""The gradient of a key's bias is zero except for rounding errors."""


def run(seed: int, noise: float, *, wrong: str = "", by: float = 0.0, since: int = CAPTURED + 1) -> Any:
    """Return a run whose gradients differ from those of other runs by the share ``noise``. The gradient ``wrong`` is
    off by the share ``by``."""
    own, sketches = np.random.default_rng(seed), {}
    for step in STEPS:
        sketches[step] = {}
        for number, name in enumerate(NAMES):
            shared = np.random.default_rng((step, number))
            true = shared.normal(size=SIZE) * SCALES[name]
            spread = 1e-6 if name == "key.bias" else noise * SCALES[name]
            gradient = true + own.normal(size=SIZE) * spread
            if name == wrong and step >= since:
                gradient = gradient + shared.normal(size=SIZE) * by * SCALES[name]
            signs = np.random.default_rng(number).choice([-1.0, 1.0], (PROJECTIONS, SIZE))
            sketches[step][0, name] = GradientSketch(name, float(np.linalg.norm(gradient)), tuple(signs @ gradient))
    return SimpleNamespace(sketches=sketches)


def check(eager: float, **graphed: Any) -> Any:
    return check_first_replay(run(1, eager), run(3, **graphed), [run(2, eager)], CAPTURED)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 2e-2])
@pytest.mark.parametrize(("wrong", "by"), [("layer.weight", 0.5), ("layer.bias", 1.0)])
def test_a_wrong_gradient_is_named(noise: float, wrong: str, by: float) -> None:
    found = check(noise, noise=noise, wrong=wrong, by=by)
    assert (
        found and found.verdict == "DIVERGED" and f"{wrong} on rank 0" in found.reason and "in step 4" in found.reason
    )


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_a_small_gradient_that_differs_leaves_a_doubt(noise: float) -> None:
    """Attention without positions changed gradients of this size by a tenth, and losses agreed to 0.0005."""
    found = check(noise, noise=noise, wrong="query.weight", by=0.1)
    assert found and found.verdict == "INCONCLUSIVE" and "query.weight on rank 0 by 0.1" in found.reason


def test_a_gradient_that_is_not_computed_is_named() -> None:
    """A capture omits a parameter that its own step did not use, and so does every replay."""
    one, two, graphed = (run(seed, 0.01) for seed in (1, 2, 3))
    for step in STEPS[CAPTURED + 1 :]:
        del graphed.sketches[step][0, "layer.bias"]
    found = check_first_replay(one, graphed, [two], CAPTURED)
    assert found and found.verdict == "DIVERGED" and "layer.bias on rank 0 by " in found.reason
    # A captured optimizer hides all gradients.
    graphed.sketches |= {step: {} for step in STEPS[CAPTURED + 1 :]}
    assert check_first_replay(one, graphed, [two], CAPTURED) is None


@pytest.mark.parametrize(
    ("eager", "graphed"),
    [
        (0.0, {"noise": 0.0}),
        (0.0, {"noise": 4e-3}),  # These are other kernels, in bf16.
        (5e-2, {"noise": 5e-2}),
        # This is another model, from the first step on.
        (0.0, {"noise": 0.0, "wrong": "layer.weight", "by": 0.5, "since": 0}),
        (0.0, {"noise": 0.0, "wrong": "key.bias", "by": 1.0}),
    ],
)
def test_rounding_and_noise_are_no_fault(eager: float, graphed: dict[str, Any]) -> None:
    assert check(eager, **graphed) is None


def test_noise_of_two_eager_runs_rarely_hides_itself() -> None:
    """The estimates rest on few projections. Nevertheless, none of two hundred clean triples is called wrong."""
    for seed in range(200):
        trio = [run(1000 + 3 * seed + number, 0.05) for number in range(3)]
        assert check_first_replay(trio[0], trio[2], trio[1:2], CAPTURED) is None


def test_one_eager_run_decides_nothing() -> None:
    assert check_first_replay(run(1, 0.0), run(2, 0.0, wrong="layer.weight", by=1.0), [], CAPTURED) is None
