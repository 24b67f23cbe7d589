"""Gather the parameters of the whole model from all ranks."""

from __future__ import annotations

import io

import torch
import torch.distributed as dist

from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.init.initial_weights import named_weights
from launch.engines.torch_native.parallel.collectives import all_gather_single
from launch.engines.torch_native.parallel.process_groups import Group
from tests.sharding import join_parts


def whole_parameters(engine: TorchNativeEngine) -> dict[str, torch.Tensor]:
    """Return all parameters on the CPU, by their names in one process. This is a collective call."""
    gathered: dict[str, torch.Tensor] = {}
    for chunk in engine.chunks:
        for name, (parameter, sharding) in named_weights(chunk, chunk.context.model).items():
            group = engine.mesh.ep if sharding.axis == "ep" else engine.mesh.tp
            gathered[name] = join_parts(sharding, _parts(parameter.detach(), group)).cpu()
    if engine.mesh.pp.size > 1:
        packed = io.BytesIO()
        torch.save(gathered, packed)  # As an object, each tensor would be a file of its own.
        stages = [b""] * engine.mesh.pp.size
        dist.all_gather_object(stages, packed.getvalue(), group=engine.mesh.pp.process_group)
        for stage in stages:
            gathered |= torch.load(io.BytesIO(stage), weights_only=False)
    return gathered


def _parts(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    if group.size == 1:
        return [tensor.clone()]
    parts = tensor.new_empty(group.size, *tensor.shape)
    all_gather_single(parts.view(-1), tensor.contiguous().view(-1), group=group.process_group)
    return list(parts)
