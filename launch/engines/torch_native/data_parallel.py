"""Data parallelism: every rank has the whole model and its own micro-batches; gradients and losses are averaged."""

from __future__ import annotations

import torch
import torch.distributed as dist

from launch.engines.base import Mesh


def average(mesh: Mesh, *tensors: torch.Tensor) -> None:
    """Replace each tensor by its mean over the ranks, in one all-reduce each; nothing where there is one rank."""
    if mesh.world_size == 1:
        return
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(mesh.world_size)
