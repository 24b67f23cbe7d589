"""The dense MLP of a layer."""

from __future__ import annotations

import torch
from torch import nn

from launch.contract.spec import Model
from launch.engines.torch_native.layers.pointwise import Elementwise
from launch.engines.torch_native.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallel


class Mlp(nn.Module):
    """A gated activation of ``width`` channels between two projections."""

    def __init__(self, model: Model, width: int, elementwise: Elementwise, tp: TensorParallel) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear(model.hidden_size, (width, width), model.add_bias_linear, tp)
        self.down = RowParallelLinear(width, model.hidden_size, model.add_bias_linear, tp)
        self.activation = getattr(elementwise, model.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence or this rank's shard, hidden_size) -> the same."""
        output: torch.Tensor = self.down(self.activation(self.gate_up(x)))
        return output
