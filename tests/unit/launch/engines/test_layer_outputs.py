from __future__ import annotations

from typing import Any

import torch

from launch.engines.layer_outputs import LayerOutputs

OUTPUT = torch.zeros(3)


class Replay(torch.autograd.Function):
    """As a local graph of Megatron-Core: each call writes the same tensor and returns it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            OUTPUT.copy_(2 * x)
        return OUTPUT

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def test_each_replay_of_a_graph_keeps_the_gradient_of_its_output() -> None:
    x = torch.ones(3, requires_grad=True)
    for factor in (3.0, 5.0):
        kept = LayerOutputs(num_layers=1)
        output = Replay.apply(x)
        kept.observe(0, 1, output)
        (factor * output).sum().backward()
        found = {result.name: tensor.tolist() for result, tensor in kept.kept.items()}
        assert found == {
            "output of decoder layer 0, micro-batch 0": [2.0] * 3,
            "gradient of the output of decoder layer 0, micro-batch 0": [factor] * 3,
        }


class Pair(torch.autograd.Function):
    """As a checkpointed layer: it returns several outputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return 2 * first + 3 * second


def test_an_output_that_no_loss_depends_on_has_no_gradient() -> None:
    kept = LayerOutputs(num_layers=1)
    output, other = Pair.apply(torch.ones(3, requires_grad=True))
    kept.observe(0, 1, output)
    other.sum().backward()
    assert [result.name for result in kept.kept] == ["output of decoder layer 0, micro-batch 0"]
