"""This rank's process group for every kind of parallelism, from DeviceMesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from launch.contract.spec import Axis, Parallelism
from launch.engines.protocol import RankPlace

DENSE_AXES: tuple[Axis, ...] = ("tp", "dp", "pp")
EXPERT_AXES: tuple[Axis, ...] = ("ep", "expert_dp")


@dataclass(frozen=True)
class Group:
    """The ranks along one axis, and this rank's place among them. ``process_group`` is None for a single rank."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelMesh:
    """All groups of this rank. Experts have their own groups: ``ep`` and ``expert_dp``."""

    device: torch.device
    dims: Parallelism
    world: Group
    tp: Group
    dp: Group
    pp: Group
    ep: Group
    expert_dp: Group


def make_mesh(place: RankPlace, dims: Parallelism) -> ParallelMesh:
    """Create the groups. A collective call: every rank creates the same groups in the same order."""
    alone = dict.fromkeys((*DENSE_AXES, *EXPERT_AXES), Group())
    if place.world_size == 1:
        return ParallelMesh(place.device, dims, world=Group(), **alone)
    kind = place.device.type
    dense = init_device_mesh(kind, (dims.pp, dims.dp, dims.tp), mesh_dim_names=("pp", "dp", "tp"))
    experts = init_device_mesh(kind, (dims.pp, dims.expert_dp, dims.ep), mesh_dim_names=("pp", "expert_dp", "ep"))
    made = {
        axis: Group(dims.rank_in(axis, place.rank), dims.size(axis), mesh.get_group(axis))
        for mesh, axes in ((dense, DENSE_AXES), (experts, EXPERT_AXES))
        for axis in axes
        if dims.size(axis) > 1
    }
    return ParallelMesh(place.device, dims, Group(place.rank, place.world_size, dist.group.WORLD), **alone | made)
