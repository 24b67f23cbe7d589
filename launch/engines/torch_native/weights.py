"""First weights, drawn from (seed, parameter name) alone: the same whatever the layout and the order of construction."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import nn

from launch.engines.torch_native.blueprint import Blueprint
from launch.engines.torch_native.mesh import Group
from launch.engines.torch_native.sharding import Sharding, shardings_of
from launch.spec import Model

INTO_RESIDUAL = ("attention.output.weight", "mlp.down.weight", "mlp.down", "mlp.shared.down.weight")
"""Projections that add to the residual stream; their deviation shrinks with depth (GPT-2, Megatron-LM)."""


@torch.no_grad()
def draw_weights(module: nn.Module, blueprint: Blueprint, seed: int) -> None:
    """Norms become one, biases and sinks zero, all else normal with deviation ``init_std``; experts are drawn one by one,
    each by its name. A part of a parameter is that part of the whole."""
    for name, (parameter, sharding) in named_weights(module, blueprint.model).items():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(("bias", "sinks")):
            parameter.zero_()
        else:
            deviation = blueprint.model.init_std
            if name.endswith(INTO_RESIDUAL):
                deviation /= math.sqrt(2 * blueprint.model.num_layers)
            if parameter.dim() == 3:
                _draw_experts(parameter, name, seed, deviation, blueprint.ep)
            else:
                _draw(parameter, name, seed, deviation, sharding, blueprint.tp.group)


def named_weights(module: nn.Module, model: Model) -> dict[str, tuple[nn.Parameter, Sharding]]:
    """Parameters by their name in the whole model, where a tied head is the embedding."""
    tied = {"head.weight": "embedding.weight"} if model.tie_embeddings else {}
    shardings = shardings_of(module)
    return {tied.get(name, name): (parameter, shardings[name]) for name, parameter in module.named_parameters()}


def _draw(parameter: torch.Tensor, name: str, seed: int, deviation: float, sharding: Sharding, tp: Group) -> None:
    shape = list(parameter.shape)
    if sharding.axis == "tp":
        shape[sharding.dim] *= tp.size
    parameter.copy_(sharding.take(_normal(seed, name, shape, parameter.device), tp) * deviation)


def _draw_experts(parameter: torch.Tensor, name: str, seed: int, deviation: float, ep: Group) -> None:
    for number, expert in enumerate(parameter, start=ep.rank * len(parameter)):
        expert.copy_(_normal(seed, f"{name}.{number}", expert.shape, expert.device) * deviation)


def _normal(seed: int, name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Standard normal numbers in float32, which every precision then rounds."""
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little"))
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
