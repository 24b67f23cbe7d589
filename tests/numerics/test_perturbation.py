"""Test the perturbed eager run: it equals the eager baseline until one step, and then differs only by rounding errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from launch.contract.errors import EnvironmentFault
from launch.contract.spec import RunSpec
from launch.engines.perturbation import next_after
from launch.engines.protocol import Engine, RankPlace
from launch.engines.torch_native.engine import build
from launch.train.fault_injection import FaultyStep
from launch.train.perturbation import perturb, perturb_weight
from tests.numerics.megatron.megatron_on_cpu import megatron_engine
from tests.numerics.tiny import CPU, DENSE, batches, make_spec

STEPS = 8
PERTURBED = 2

Build = Callable[[RunSpec], AbstractContextManager[Engine]]


def torch_native(spec: RunSpec) -> AbstractContextManager[Engine]:
    return nullcontext(build(spec, RankPlace(0, 1, CPU)))


def check(spec: RunSpec, engine_of: Build, inject: Callable[[FaultyStep], None] = perturb) -> None:
    """Train with and without the perturbation. It must show from its step on, and its gradients must be right."""

    def train(engine: Engine) -> list[tuple[float, float]]:
        results = (engine.step(batch) for batch in itertools.islice(batches(spec), STEPS))
        return [(result.loss.item(), result.grad_norm.item()) for result in results]

    with engine_of(spec) as engine:
        plain = train(engine)
    with engine_of(spec) as engine:
        FaultyStep(engine, inject, PERTURBED, CPU)
        perturbed = train(engine)
    assert perturbed[:PERTURBED] == plain[:PERTURBED]
    assert perturbed[PERTURBED:] != plain[PERTURBED:]
    ulp = torch.finfo(torch.float32 if spec.training.precision == "fp32" else torch.bfloat16).eps
    torch.testing.assert_close(perturbed, plain, rtol=100 * ulp, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_step_is_off_by_rounding_and_its_gradients_are_sound(precision: str, recompute: str) -> None:
    check(make_spec(precision=precision, recompute=recompute, steps=STEPS), torch_native)


def test_a_model_without_a_first_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the run would equal the eager baseline, and every rounding error would look like a fault."""
    model = torch.nn.Linear(2, 2)

    class Other:
        def step(self, batch: torch.Tensor) -> None:
            model(batch)

    engine = Other()
    FaultyStep(engine, perturb, PERTURBED, CPU)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFault, match=r"Linear has no module layers\.0"):
        engine.step(torch.zeros(2))
    monkeypatch.setenv("RANK", "1")
    FaultyStep(other := Other(), perturb, PERTURBED, CPU)  # type: ignore[arg-type]
    other.step(torch.zeros(2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_is_compiled_whole_is_perturbed_in_a_weight(precision: str) -> None:
    model = replace(DENSE, num_layers=1)
    check(make_spec(model, precision=precision, compile="whole", steps=STEPS), torch_native, perturb_weight)
    torch.compiler.reset()


def test_the_weight_of_a_lean_optimizer_is_moved_for_one_step() -> None:
    """The weights are part of the masters. A weight that stayed moved would add the noise of a whole bfloat16 unit."""
    spec = make_spec(DENSE, precision="bf16", optimizer_precision="lean", learning_rate=1e-5, steps=STEPS)
    masters = []
    for inject in (lambda run: None, partial(perturb_weight, lean=True)):
        engine = build(spec, RankPlace(0, 1, CPU))
        FaultyStep(engine, inject, PERTURBED, CPU)
        for batch in itertools.islice(batches(spec), STEPS):
            engine.step(batch)
        masters.append(torch.cat([shard.masters(slice(None)) for shard in engine.flat_parameters.shards]))
    apart = (masters[0] - masters[1]).abs().max()
    assert 0 < apart < torch.finfo(torch.bfloat16).eps / 8


def test_a_layer_of_megatron_core_is_perturbed() -> None:
    check(make_spec(DENSE, precision="bf16", steps=STEPS), megatron_engine)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_limits_of_a_type_stay_as_they_are(dtype: torch.dtype) -> None:
    """A softmax over a row that a mask fills with the smallest number is uniform. Over infinities it is NaN."""
    limits = torch.tensor([math.inf, -math.inf, torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype)
    for toward in (limits.sign() * math.inf, -limits[:2].sign().repeat(2) * math.inf):
        moved = next_after(limits, toward)
        assert torch.equal(moved.isinf(), limits.isinf())
