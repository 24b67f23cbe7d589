"""The perturbed eager run: equal to the eager baseline until one step, and then different by rounding errors alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from launch.engines.protocol import Engine, RankPlace
from launch.engines.torch_native.engine import build
from launch.train.fault_injection import FaultyEngine
from launch.train.perturbation import perturb
from tests.numerics.tiny import CPU, batches, make_spec

STEPS = 8
PERTURBED = 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_step_is_off_by_rounding_and_its_gradients_are_sound(precision: str, recompute: str) -> None:
    spec = make_spec(precision=precision, recompute=recompute, steps=STEPS)

    def train(engine: Engine) -> list[tuple[float, float]]:
        results = (engine.step(batch) for batch in itertools.islice(batches(spec), STEPS))
        return [(result.loss.item(), result.grad_norm.item()) for result in results]

    plain = train(build(spec, RankPlace(0, 1, CPU)))
    faulty = FaultyEngine(build(spec, RankPlace(0, 1, CPU)), perturb, PERTURBED, CPU)
    perturbed = train(faulty)
    assert perturbed[:PERTURBED] == plain[:PERTURBED]
    assert perturbed[PERTURBED:] != plain[PERTURBED:]
    ulp = torch.finfo(torch.float32 if precision == "fp32" else torch.bfloat16).eps
    torch.testing.assert_close(perturbed, plain, rtol=100 * ulp, atol=0)
