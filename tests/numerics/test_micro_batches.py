"""Test micro-batches through a stage that runs from graphs: its outputs stay valid, whatever runs next."""

from __future__ import annotations

from typing import Any

import torch

from launch.engines.torch_native.decoder import Layer, RunLayer, build_decoder, ignore_output
from launch.engines.torch_native.layers.attention_backends import Positions
from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.microbatches import Microbatches
from launch.engines.torch_native.moe.layer import RoutingStats
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from tests.numerics.tiny import CPU, DENSE

MICRO_BATCHES, SHAPE = 2, (1, 8, DENSE.hidden_size)


class OfStaticMemory(torch.autograd.Function):
    """Treat the gradient of the input as a graphed callable does: each backward pass writes it to the same place
    (torch.cuda.make_graphed_callables)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.place = place
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.place.copy_(gradient)
        return ctx.place.detach(), None


def graphed(layer: Layer, place: torch.Tensor) -> RunLayer:
    def run(x: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, RoutingStats | None]:
        of_static_memory: torch.Tensor = OfStaticMemory.apply(x, place)  # type: ignore[no-untyped-call]
        return layer.forward(of_static_memory, positions)

    return run


def test_a_gradient_that_is_being_sent_is_not_overwritten_by_the_next_micro_batch() -> None:
    """On a GPU, a send reads it at any later time, and the next replay does not wait for that."""
    stage = build_decoder(BuildContext(DENSE), 1, torch.float32, CPU, range(1, DENSE.num_layers))
    layers, place = stage.named_layers(), torch.empty(SHAPE)
    run = {"1": graphed(layers["1"], place)}
    tokens = torch.randint(DENSE.vocab_size, (MICRO_BATCHES, 1, 9), generator=torch.Generator().manual_seed(1))
    micro_batches = Microbatches(
        tokens, [stage], stage, lambda chunk, number: run, FlatParameters(stage), lambda number: ignore_output
    )
    sent: list[torch.Tensor] = []
    as_sent: list[torch.Tensor] = []
    for number in range(MICRO_BATCHES):
        micro_batches.forward(0, number, torch.randn(SHAPE, generator=torch.Generator().manual_seed(number)))
        gradient = micro_batches.backward(0, number, None)
        assert gradient is not None
        sent.append(gradient)
        as_sent.append(gradient.clone())
    assert torch.equal(place, as_sent[-1]) and not torch.equal(*as_sent)
    assert all(map(torch.equal, sent, as_sent))
