"""The dense feed-forward of a layer."""

from __future__ import annotations

import torch
from torch import nn

from launch.engines.torch_native.elementwise import Elementwise
from launch.spec import Model


class Mlp(nn.Module):
    """A gated activation between two projections. ``width`` is that of the activation."""

    def __init__(self, model: Model, width: int, elementwise: Elementwise) -> None:
        super().__init__()
        self.gate_up = nn.Linear(model.hidden_size, 2 * width, bias=model.add_bias_linear)
        self.down = nn.Linear(width, model.hidden_size, bias=model.add_bias_linear)
        self.activation = getattr(elementwise, model.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden) -> the same."""
        changed: torch.Tensor = self.down(self.activation(self.gate_up(x)))
        return changed
