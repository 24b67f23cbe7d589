"""Compare clipping, AdamW, the schedule and the master weights with plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from launch.contract.spec import Training
from launch.engines.lr_schedule import learning_rate
from launch.engines.torch_native.optim import fused_kernels
from launch.engines.torch_native.optim.accumulation import BLOCK, FusedAccumulation, writable_parts
from launch.engines.torch_native.optim.adamw import Optimizer
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from tests.numerics.optimizer_steps import accumulate, take_step


class Pair(nn.Module):
    """A matrix, which decays, and a vector, which does not. The vector comes first, to test the order."""

    def __init__(self, dtype: torch.dtype, value: float = 1.0) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.full((3,), value, dtype=dtype))
        self.matrix = nn.Parameter(torch.full((2, 5), value, dtype=dtype))


def in_order(main: FlatParameters, pair: Pair, vector: torch.Tensor, matrix: torch.Tensor) -> list[torch.Tensor]:
    return [vector if parameter is pair.vector else matrix for parameter in main.parameters]


def test_clipped_adamw_equals_the_formula() -> None:
    training = Training(
        learning_rate=0.01, learning_rate_schedule="constant", weight_decay=0.1, clip_grad=0.5, adam_epsilon=1e-3
    )
    pair = Pair(torch.float64)
    main = FlatParameters(pair)
    optimizer = Optimizer(main, training)
    generator = torch.Generator().manual_seed(3)
    values = {"vector": torch.ones(3, dtype=torch.float64), "matrix": torch.ones(2, 5, dtype=torch.float64)}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in values.items()}
    for step in range(5):
        scale = 10.0**-step  # The first steps are clipped, the last ones are not.
        drawn = {name: scale * torch.randn(v.shape, dtype=v.dtype, generator=generator) for name, v in values.items()}
        accumulate(main, in_order(main, pair, drawn["vector"], drawn["matrix"]), 1.0)
        norm = take_step(optimizer, step)

        expected_norm = math.sqrt(sum(g.square().sum().item() for g in drawn.values()))
        assert norm.item() == pytest.approx(expected_norm, rel=1e-12)
        for name, gradient in drawn.items():
            gradient = gradient * min(1.0, 0.5 / (expected_norm + 1e-6))
            mean, square = moments[name]
            mean = 0.9 * mean + 0.1 * gradient
            square = 0.95 * square + 0.05 * gradient**2
            moments[name] = (mean, square)
            decay = 0.1 if name == "matrix" else 0.0
            update = mean / (1 - 0.9 ** (step + 1)) / (torch.sqrt(square / (1 - 0.95 ** (step + 1))) + 1e-3)
            values[name] = values[name] * (1 - 0.01 * decay) - 0.01 * update
        # The rate is a float32 scalar on the device.
        torch.testing.assert_close(pair.vector.detach(), values["vector"], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(pair.matrix.detach(), values["matrix"], rtol=1e-7, atol=1e-9)


def test_no_limit_leaves_gradients_alone() -> None:
    rates = {"learning_rate": 0.5, "learning_rate_schedule": "constant", "weight_decay": 0.0, "adam_epsilon": 1.0}
    pair = Pair(torch.float64)
    main = FlatParameters(pair)
    optimizer = Optimizer(main, Training(**rates, clip_grad=0.0))
    accumulate(main, [torch.full_like(parameter, 100.0) for parameter in main.parameters], 1.0)
    take_step(optimizer, 0)
    torch.testing.assert_close(pair.vector.detach(), torch.full((3,), 1 - 0.5 * 100 / 101, dtype=torch.float64))


def test_the_norm_of_many_gradients_is_exact() -> None:
    """One sum in float32 over these elements makes the norm 0.04% too small."""
    module = nn.Linear(2**12, 2**11, bias=False)
    main = FlatParameters(module)
    gradient = torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(0))
    accumulate(main, [gradient], 1.0)
    expected = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
    assert Optimizer(main, Training()).norm().item() == pytest.approx(expected, rel=1e-6)


def test_updates_below_the_resolution_of_bfloat16_add_up() -> None:
    training = Training(learning_rate=1e-4, learning_rate_schedule="constant", weight_decay=0.0)
    pair = Pair(torch.bfloat16)
    main = FlatParameters(pair)
    optimizer = Optimizer(main, training)
    seen = []
    for step in range(100):
        accumulate(main, [torch.ones_like(parameter) for parameter in main.parameters], 1.0)
        take_step(optimizer, step)
        seen.append(pair.matrix[0, 0].item())
    assert seen[0] == 1.0  # Rounding hides one update from the weights that the model computes with.
    assert seen[-1] == pytest.approx(0.99, abs=2**-9)  # It does not hide a hundred updates.
    assert pair.matrix.dtype == torch.bfloat16


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    main = FlatParameters(Pair(torch.bfloat16))
    accumulate(main, [torch.ones_like(parameter) for parameter in main.parameters], 1.0)
    for _ in range(256):
        accumulate(main, [torch.full_like(parameter, 2.0**-9) for parameter in main.parameters], 1.0)
    assert main.gradients.dtype == torch.float32
    assert main.gradients.max().item() == 1.5  # In bfloat16 the sum would have stayed at 1.


def test_bfloat16_gradients_update_as_their_float32_values_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update runs in pieces smaller than a parameter, across the border between decaying and other parameters."""
    monkeypatch.setattr("launch.engines.torch_native.optim.adamw.CONVERTED_ELEMENTS", 100)
    training = Training(learning_rate=0.01, clip_grad=0.5, weight_decay=0.1)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        module = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 10)).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        main = FlatParameters(module, gradient_dtype=dtype)
        adamw = Optimizer(main, training)
        norms = []
        for step in range(3):
            drawn = torch.Generator().manual_seed(step)
            accumulate(main, [torch.randn(p.shape, generator=drawn).to(p.dtype) for p in main.parameters], 0.5)
            norms.append(take_step(adamw, step))
        assert main.gradients.dtype == dtype
        results.append((main.weights.clone(), torch.stack(norms)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("count", [1, 2**16, 2**16 + 1, 2**18, 3 * 2**20 + 5])
def test_no_part_covers_what_later_parts_read(count: int) -> None:
    """Element i takes bytes 4i to 4i + 4, and its first gradient bytes 2 count + 2i to 2 count + 2i + 2."""
    parts = list(writable_parts(count))
    assert [part.stop for part in parts] == [part.start for part in parts[1:]] + [count] and parts[0].start == 0
    for part in parts[:-1]:
        assert 4 * part.stop <= 2 * count + 2 * part.start and part.start % BLOCK == 0
    assert parts[-1].stop - parts[-1].start <= 2**16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_one_pass_updates_as_separate_operators_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first micro-batch of a step overwrites gradients. AdamW includes clipping and rounding, and runs in pieces."""
    monkeypatch.setattr(fused_kernels, "PIECE_ELEMENTS", 300)
    results = []
    for compile, fused in (("none", None), ("elementwise", FusedAccumulation())):
        module = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)).to(dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
        main = FlatParameters(module, fused=fused)
        training = Training(learning_rate=0.01, clip_grad=0.5, weight_decay=0.1, compile=compile)
        optimizer, norms = Optimizer(main, training), []
        for step in range(3):
            for micro_batch in range(2):
                inputs = torch.randn(5, 30, generator=torch.Generator().manual_seed(2 * step + micro_batch)).to(dtype)
                with main.accumulate_gradients(0.5, first=micro_batch == 0, last=micro_batch == 1):
                    torch.autograd.grad(module(inputs).square().sum(), list(module.parameters()))
            main.finish()
            norms.append(take_step(optimizer, step))
        results.append((main.weights.clone(), torch.stack(norms), *(p.detach().clone() for p in module.parameters())))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance)


def test_schedule_values() -> None:
    training = Training(
        steps=12,
        learning_rate=1.0,
        min_learning_rate=0.2,
        learning_rate_warmup_steps=4,
        learning_rate_schedule="cosine",
    )
    assert [learning_rate(training, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert learning_rate(training, 8) == pytest.approx(0.6)
    assert learning_rate(training, 12) == pytest.approx(0.2)
    assert learning_rate(training, 1000) == pytest.approx(0.2)


@given(
    steps=st.integers(1, 200),
    warmup=st.integers(0, 250),
    schedule=st.sampled_from(["constant", "cosine"]),
    step=st.integers(0, 400),
)
def test_rates_rise_through_the_warm_up_and_then_never_again(steps: int, warmup: int, schedule: str, step: int) -> None:
    training = Training(
        steps=steps,
        learning_rate=1.0,
        min_learning_rate=0.1,
        learning_rate_warmup_steps=warmup,
        learning_rate_schedule=schedule,  # type: ignore[arg-type]
    )
    now, after = learning_rate(training, step), learning_rate(training, step + 1)
    assert 0 < now <= 1.0
    assert now <= after if step < warmup else now >= after
