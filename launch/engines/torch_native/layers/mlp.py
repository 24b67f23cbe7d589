"""The dense MLP of a layer."""

from __future__ import annotations

import torch
from torch import nn

from launch.engines.torch_native.layers.build_context import BuildContext


class Mlp(nn.Module):
    """A gated activation of ``width`` channels between two projections."""

    def __init__(self, context: BuildContext, width: int) -> None:
        super().__init__()
        model, products, tp = context.model, context.products, context.tp
        self.gate_up = products.column_parallel(model.hidden_size, (width, width), model.add_bias_linear, tp)
        self.down = products.row_parallel(width, model.hidden_size, model.add_bias_linear, tp)
        self.activation = getattr(context.elementwise, model.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence or this rank's shard, hidden_size) -> the same."""
        output: torch.Tensor = self.down(self.activation(self.gate_up(x)))
        return output
