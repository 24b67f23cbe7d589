"""On a GPU, test that the kernel of gradient accumulation adds as PyTorch's operators do, bit for bit, also in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from launch.engines.torch_native.optim.accumulation import LEAST_FUSED_ELEMENTS, FusedAccumulation

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
SCALES = (0.5, 0.3, 1 / 3, 0.7)
COUNTS = (LEAST_FUSED_ELEMENTS, 3 * 2**20 + 5, 2**24 + 64)


def drawn(count: int, number: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(number)
    return [torch.randn(count, device="cuda", generator=generator).bfloat16() for _ in range(number)]


def added(into: torch.Tensor, gradients: Sequence[torch.Tensor], fused: FusedAccumulation) -> torch.Tensor:
    """Accumulate a step's gradients. Return their squared norm."""
    for number, gradient in enumerate(gradients):
        fused(into, gradient, SCALES[number], number == 0, number == len(gradients) - 1)
    squares = fused.squared_norm()
    assert squares is not None
    return squares


def expected(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return their sum, each times its scale, rounded to ``dtype`` after each addition."""
    total = torch.zeros(len(gradients[0]), dtype=dtype, device="cuda")
    for gradient, scale in zip(gradients, SCALES, strict=False):
        total = (total.float() + gradient.float() * scale).to(dtype)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_sums_and_norms_are_those_of_operators(count: int, dtype: torch.dtype) -> None:
    into, fused = torch.full((count,), torch.nan, dtype=dtype, device="cuda"), FusedAccumulation(sums_squares=True)
    for number in (1, 2, 3, 4, 2):
        gradients = drawn(count, number)
        squares = added(into, gradients, fused)
        assert torch.equal(into, expected(gradients, dtype))
        torch.testing.assert_close(squares.double(), into.double().square().sum(), rtol=1e-6, atol=0)


def test_a_graph_adds_the_gradients_of_each_replay() -> None:
    fused, into, static = (
        FusedAccumulation(sums_squares=True),
        torch.zeros(COUNTS[1], device="cuda"),
        drawn(COUNTS[1], 2),
    )
    added(into, static, fused)  # compiles it
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        squares = added(into, static, fused)
    for step in range(3):
        for one, new in zip(static, drawn(COUNTS[1], 2 + step), strict=False):
            one.copy_(new)
        graph.replay()
        assert torch.equal(into, expected(static, torch.float32))
        torch.testing.assert_close(squares.double(), into.double().square().sum(), rtol=1e-6, atol=0)
