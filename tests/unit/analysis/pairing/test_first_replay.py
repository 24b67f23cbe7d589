"""Test gradients of the first replays: a wrong gradient is named, but rounding, noise and an earlier difference are no
fault."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from analysis.pairing.first_replay import compare_first_replays
from analysis.sweep.judge_sweep import judge_sweep
from launch.contract.records.sketch import SUMS, Sketch
from tests.records import AttemptRecord, write_sweep

STEPS, CAPTURED, SIZE = range(6), 3, 120 * SUMS
NAMES = ("layer.weight", "layer.bias", "query.weight", "value.weight", "norm.bias", "key.bias")
SCALES = {
    "layer.weight": 1.0,
    "layer.bias": 0.1,
    "query.weight": 1e-3,
    "value.weight": 2e-3,
    "norm.bias": 1e-2,
    "key.bias": 1e-6,
}
ATTENTION = ("query.weight", "value.weight")
"""The gradient of a key's bias is zero except for rounding errors."""


def run(
    seed: int, noise: float, *, wrong: str | tuple[str, ...] = (), by: float = 0.0, since: int = CAPTURED + 1
) -> Any:
    """Return a run whose gradients differ from those of other runs by the share ``noise``. The gradients ``wrong`` are
    off by the share ``by``."""
    own = np.random.default_rng(seed)
    sketches: dict[int, dict[tuple[int, str], Sketch]] = {}
    for step in STEPS:
        sketches[step] = {}
        for number, name in enumerate(NAMES):
            true, fault = (drawn * SCALES[name] for drawn in shared_numbers(step, number))
            spread = 1e-6 if name == "key.bias" else noise * SCALES[name]
            gradient = true + own.normal(size=SIZE) * spread
            if name in ((wrong,) if isinstance(wrong, str) else wrong) and step >= since:
                gradient = gradient + fault * by
            sums = (signs(number) * gradient).reshape(-1, SUMS).sum(axis=0)
            sketches[step][0, name] = Sketch(name, float(np.linalg.norm(gradient)), tuple(sums.tolist()))
    return SimpleNamespace(sketches=sketches)


@cache
def shared_numbers(step: int, number: int) -> Any:
    """Return what all runs share of a gradient, before its scale: the gradient itself, and a fault. Shape (2, SIZE)."""
    return np.random.default_rng((step, number)).normal(size=(2, SIZE))


@cache
def signs(number: int) -> Any:
    return np.random.default_rng(number).choice([-1.0, 1.0], SIZE)


def judge(eager: Any, graphed: Any, others: list[Any], captured: int = CAPTURED) -> Any:
    replays = compare_first_replays(eager, graphed, others, captured)
    return replays.fault() or replays.doubt()


def check(eager: float, **graphed: Any) -> Any:
    return judge(run(1, eager), run(3, **graphed), [run(2, eager)])


@pytest.mark.parametrize("noise", [0.0, 1e-3, 2e-2])
@pytest.mark.parametrize(("wrong", "by"), [("layer.weight", 0.5), ("layer.bias", 1.0)])
def test_a_wrong_gradient_is_named(noise: float, wrong: str, by: float) -> None:
    found = check(noise, noise=noise, wrong=wrong, by=by)
    assert (
        found and found.verdict == "DIVERGED" and f"{wrong} on rank 0" in found.reason and "in step 4" in found.reason
    )


@pytest.mark.parametrize("noise", [0.0, 1e-3])
@pytest.mark.parametrize(("wrong", "by"), [(ATTENTION, 0.1), (("norm.bias",), 0.5)])
def test_small_gradients_that_differ_leave_a_doubt(noise: float, wrong: tuple[str, ...], by: float) -> None:
    """Attention without positions changed gradients of this size by a tenth, and losses agreed to 0.0005."""
    found = check(noise, noise=noise, wrong=wrong, by=by)
    assert found and found.verdict == "INCONCLUSIVE" and "in steps 4, 5" in found.reason
    assert all(f"{name} on rank 0 by 0." in found.reason for name in wrong)


def test_a_gradient_that_is_not_computed_is_named() -> None:
    """A capture omits a parameter that its own step did not use, and so does every replay."""
    one, two, graphed = (run(seed, 0.01) for seed in (1, 2, 3))
    for step in STEPS[CAPTURED + 1 :]:
        del graphed.sketches[step][0, "layer.bias"]
    found = judge(one, graphed, [two])
    assert found and found.verdict == "DIVERGED" and "layer.bias on rank 0 by " in found.reason
    # A captured optimizer hides all gradients.
    graphed.sketches |= {step: {} for step in STEPS[CAPTURED + 1 :]}
    assert judge(one, graphed, [two]) is None


@pytest.mark.parametrize(
    ("eager", "graphed"),
    [
        (0.0, {"noise": 0.0}),
        (0.0, {"noise": 4e-3}),  # These are other kernels, in bf16.
        (5e-2, {"noise": 5e-2}),
        # This is another model, from the first step on.
        (0.0, {"noise": 0.0, "wrong": "layer.weight", "by": 0.5, "since": 0}),
        (0.0, {"noise": 0.0, "wrong": "key.bias", "by": 1.0}),
        # Rounding moved the norm's gradient of one layer of 64 by this share in bf16.
        (0.0, {"noise": 1e-2, "wrong": "norm.bias", "by": 0.11}),
    ],
)
def test_rounding_and_noise_are_no_fault(eager: float, graphed: dict[str, Any]) -> None:
    assert check(eager, **graphed) is None


def test_noise_of_two_eager_runs_rarely_hides_itself() -> None:
    """The estimates rest on few sums. Nevertheless, none of two hundred clean triples is called wrong."""
    for seed in range(200):
        trio = [run(1000 + 3 * seed + number, 0.05) for number in range(3)]
        assert judge(trio[0], trio[2], trio[1:2]) is None


def test_one_eager_run_decides_nothing() -> None:
    assert judge(run(1, 0.0), run(2, 0.0, wrong="layer.weight", by=1.0), []) is None


def drawn(shares: np.ndarray, seed: int, captured: int, *, eager_noise: float = 0.0) -> Any:
    """Return the judgement of runs with small gradients. Those of the graphed run differ by ``shares`` after the capture."""
    random = np.random.default_rng(seed)
    runs: tuple[dict[int, Any], ...] = ({}, {}, {})
    for step in range(captured + 4):
        true = random.normal(size=(len(shares), SUMS)) / SUMS**0.5
        for number, sketches in enumerate(runs):
            share = eager_noise + (shares[:, None] if number == 2 and step > captured else 0.0)
            seen = true + random.normal(size=true.shape) / SUMS**0.5 * share
            sketches[step] = {(0, f"{n}"): Sketch(f"{n}", 1.0, tuple(row)) for n, row in enumerate(seen)}
    one, two, graphed = (SimpleNamespace(sketches=sketches) for sketches in runs)
    return judge(one, graphed, [two], captured)


def test_chance_rarely_makes_rounding_a_doubt() -> None:
    """The gradients of a deep model in bf16 differ by 1% in the median, and those of some layers by 4%."""
    deep = 0.011 * np.exp(0.4 * np.random.default_rng(0).normal(size=600)).clip(max=4)
    assert sum(drawn(deep, seed, 1) is not None for seed in range(8)) == 0
    assert sum(drawn(np.full(500, 0.03), seed, 1) is not None for seed in range(8)) == 0


@pytest.mark.parametrize("captured", [0, 1])
def test_noise_of_many_gradients_is_no_doubt(captured: int) -> None:
    """With a capture in step 0, no earlier step shows the noise."""
    assert not any(drawn(np.zeros(500), seed, captured, eager_noise=0.07) for seed in range(8))


@pytest.mark.parametrize(("wrong", "is_found"), [(("norm.bias",), False), (ATTENTION, True), (("layer.bias",), True)])
def test_copies_of_one_parameter_on_many_ranks_are_one_gradient(wrong: tuple[str, ...], is_found: bool) -> None:
    by = 0.5 if wrong == ("layer.bias",) else 0.08
    runs = [run(seed, 0.0) for seed in (1, 2)] + [run(3, 0.0, wrong=wrong, by=by)]
    del runs[2].sketches[CAPTURED + 2]
    for each in runs:
        for step, found in each.sketches.items():
            each.sketches[step] = {(rank, name): one for (_, name), one in found.items() for rank in range(256)}
    found = judge(runs[0], runs[2], runs[1:2])
    assert (found is not None) is is_found
    assert found is None or (found.verdict == "DIVERGED") is (by == 0.5)


@pytest.mark.parametrize("wrong", [("layer.weight", "layer.bias"), ("layer.weight",)])
@pytest.mark.parametrize(("by", "verdict"), [(0.12, "INCONCLUSIVE"), (1.0, "DIVERGED")])
def test_rounding_that_routes_other_tokens_is_only_a_doubt(wrong: tuple[str, ...], by: float, verdict: str) -> None:
    """Such rounding moved most gradients of a model with experts by a tenth, and losses agreed to 0.0003."""
    names = {"layer.weight": "layers.0.mlp.router.weight", "layer.bias": "layers.0.mlp.experts.bias"}
    runs = [run(1, 0.0), run(2, 0.0), run(3, 0.0, wrong=wrong, by=by)]
    for each in runs:
        for step, found in each.sketches.items():
            each.sketches[step] = {(rank, names.get(name, name)): sketch for (rank, name), sketch in found.items()}
    found = judge(runs[0], runs[2], runs[1:2])
    assert found and found.verdict == verdict
    assert ("routes tokens" in found.reason) == (verdict == "INCONCLUSIVE"), found.reason


@pytest.mark.parametrize(
    ("shift", "by", "verdict"),
    [(1e-4, 0.5, "INCONCLUSIVE"), (1e-4, 0.0, "EQUIVALENT"), (5.0, 0.5, "DIVERGED"), (0.0, 0.5, "INCONCLUSIVE")],
)
def test_small_gradients_doubt_only_what_passes(tmp_path: Path, shift: float, by: float, verdict: str) -> None:
    def edit(record: AttemptRecord) -> None:
        of_graphed = record.spec.graphed
        sketched = run(record.spec.repeat, 0.0, wrong="norm.bias", by=by if of_graphed else 0.0).sketches
        for metrics in record.metrics if of_graphed else ():
            if metrics["step"] > record.spec.cuda_graph.capture_step:
                metrics["loss"] += shift
        for step, found in sketched.items():
            gradients = [asdict(sketch) for sketch in found.values()]
            record.events[0].append(
                {
                    "time": 1e9,
                    "kind": "gradients",
                    "phase": "warmup",
                    "step": step,
                    "sketch": {"step": step, "gradients": gradients},
                }
            )

    results = judge_sweep(write_sweep(tmp_path, edit=edit)).results
    found = next(cell.verdict for cell in results if cell.verdict)
    assert found.verdict == verdict, found.reason
