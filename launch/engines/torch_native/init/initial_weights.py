"""Initial weights, which depend only on (seed, parameter name). They are equal for every layout and order of construction."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import nn

from launch.contract.spec import Model
from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.parallel.sharding import Sharding, find_shardings

INTO_RESIDUAL = (
    "attention.output.weight",
    "mlp.down.weight",
    "mlp.down",
    "mlp.shared.down.weight",
    "mamba.output.weight",
)
"""Projections that add to the residual stream. Their standard deviation shrinks with depth (GPT-2, Megatron-LM)."""


@torch.no_grad()
def draw_weights(module: nn.Module, context: BuildContext, seed: int) -> None:
    """Fill every parameter of ``module``, or this rank's part of it, with initial weights."""
    model, tp, ep = context.model, context.tp.group, context.ep
    for name, (parameter, sharding) in named_weights(module, model).items():
        if sharding.axis == "ep":
            for number, expert in enumerate(parameter, start=ep.rank * len(parameter)):
                matrix = context.inputs_first(expert)
                matrix.copy_(initial_weights(name, matrix.shape, model, seed, expert.device, number))
        else:
            shape = list(parameter.shape)
            if sharding.axis == "tp":
                shape[sharding.dim] *= tp.size
            parameter.copy_(sharding.take(initial_weights(name, shape, model, seed, parameter.device), tp))


def initial_weights(
    name: str, shape: Sequence[int], model: Model, seed: int, device: torch.device, expert: int | None = None
) -> torch.Tensor:
    """Return the whole parameter ``name``, or its part for expert number ``expert``, in float32 of ``shape``.

    Norms are 1. Biases and sinks are 0. All others are normal with standard deviation ``init_std``, smaller for projections
    into the residual stream.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    if name.endswith(("bias", "sinks")):
        return torch.zeros(shape, device=device)
    deviation = model.init_std
    if name.endswith(INTO_RESIDUAL):
        # A hybrid model's layer adds one part to the stream (megatron-core 0.16.1 transformer/transformer_config.py:1585).
        deviation /= math.sqrt((1 if model.is_hybrid else 2) * model.num_layers)
    return _normal(seed, name if expert is None else f"{name}.{expert}", shape, device) * deviation


def named_weights(module: nn.Module, model: Model) -> dict[str, tuple[nn.Parameter, Sharding]]:
    """Return parameters by their name in the whole model. A tied head has the name of the embedding."""
    tied = {"head.weight": "embedding.weight"} if model.tie_embeddings else {}
    shardings = find_shardings(module)
    return {tied.get(name, name): (parameter, shardings[name]) for name, parameter in module.named_parameters()}


def _normal(seed: int, name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return standard normal numbers, float32 of ``shape``. They do not depend on the training precision."""
    return torch.randn(shape, generator=generator_of(seed, name, device), device=device, dtype=torch.float32)


def generator_of(seed: int, name: str, device: torch.device) -> torch.Generator:
    """Return the generator of the parameter ``name``."""
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]
    return torch.Generator(device).manual_seed(int.from_bytes(key, "little"))
