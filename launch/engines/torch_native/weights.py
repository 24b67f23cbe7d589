"""First weights, drawn from (seed, parameter name) alone: the same whatever the layout and the order of construction."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from launch.spec import Model

INTO_RESIDUAL = ("attention.output.weight", "mlp.down.weight", "mlp.down", "mlp.shared.down.weight")
"""Projections that add to the residual stream; their deviation shrinks with depth (GPT-2, Megatron-LM)."""


@torch.no_grad()
def draw_weights(module: nn.Module, model: Model, seed: int) -> None:
    """Norms become one, biases and sinks zero, all else normal with deviation ``init_std``; experts are drawn one by one,
    each by its name."""
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(("bias", "sinks")):
            parameter.zero_()
        else:
            deviation = model.init_std
            if name.endswith(INTO_RESIDUAL):
                deviation /= math.sqrt(2 * model.num_layers)
            _draw(parameter, name, seed, deviation)


def _draw(parameter: torch.Tensor, name: str, seed: int, deviation: float) -> None:
    if parameter.dim() < 3:
        parameter.copy_(_normal(seed, name, parameter) * deviation)
        return
    for number, expert in enumerate(parameter):
        expert.copy_(_normal(seed, f"{name}.{number}", expert) * deviation)


def _normal(seed: int, name: str, like: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers in float32 of the shape of ``like``, which every precision then rounds."""
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]
    generator = torch.Generator(like.device).manual_seed(int.from_bytes(key, "little"))
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32)
