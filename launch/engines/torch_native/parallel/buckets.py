"""Where each parameter lies in the flat buffers: kinds side by side, each cut into buckets that are reduced at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from launch.engines.torch_native.parallel.process_groups import Group, ParallelMesh
from launch.engines.torch_native.parallel.sharding import Sharding

ALIGNMENT = 64
"""Elements each parameter's place is rounded up to: kernels want their operands on 128 bytes, in bfloat16 too."""

BUCKET_ELEMENTS = 2**25
"""A bucket is closed when it has so many: 128 MiB in float32. Smaller ones do not fill the links between GPUs; of larger
ones more is left to reduce when the backward pass has ended. Megatron-Core's buckets have 40 million
(DistributedDataParallel), PyTorch's 25 MiB."""


@dataclass(frozen=True)
class Kind:
    """What parameters have in common that lie in one stretch of the buffers."""

    decays: bool
    group: Group
    """The ranks that hold the same values and have gradients of their own micro-batches, which are summed up."""
    sums: tuple[Group, ...]
    """Groups over which this rank's gradient itself is a sum."""
    holders: int
    """How many ranks in all hold the same values."""


def kind_of(name: str, parameter: torch.Tensor, sharding: Sharding, mesh: ParallelMesh, tied: Group | None) -> Kind:
    """Of the parameter ``name``, whose values and whose gradient's sum it shares with the ranks of ``tied``."""
    group = mesh.expert_dp if sharding.axis == "ep" else mesh.dp
    sums = [mesh.tp] if sharding.partial else []
    if tied is not None:
        sums.append(tied)
    copies = mesh.tp.size if sharding.axis is None else 1
    copies *= tied.size if tied is not None else 1
    return Kind(_decays(name, parameter), group, tuple(sum for sum in sums if sum.size > 1), group.size * copies)


def _decays(name: str, parameter: torch.Tensor) -> bool:
    """Matrices do. The experts' biases have two dimensions and are none."""
    return parameter.dim() >= 2 and not name.endswith("bias")


def place(parameter: torch.Tensor) -> int:
    """How many elements of the buffers a parameter takes."""
    return _round_up(parameter.numel(), ALIGNMENT)


@dataclass(frozen=True)
class Bucket:
    """Elements ``start`` to ``end`` of the buffers, which hold ``parameters``, numbers of successive ones."""

    kind: Kind
    parameters: range
    start: int
    end: int
    shards: int
    """Equal parts of which each rank of ``kind.group`` updates one; 1 where every rank updates all."""

    @property
    def owned(self) -> slice:
        """What this rank updates."""
        length = (self.end - self.start) // self.shards
        start = self.start + self.kind.group.rank % self.shards * length
        return slice(start, start + length)

    @property
    def copies(self) -> int:
        """How many ranks update the same elements as this one."""
        return self.kind.holders // self.shards


def cut(places: Sequence[int], kinds: Sequence[Kind], least: int, sharded: bool) -> list[Bucket]:
    """Buckets of at least ``least`` elements, but for the last of each kind, over parameters that take ``places``.

    Args:
        kinds: of every parameter, those of a kind side by side.
        sharded: every bucket is updated in parts, one a rank (ZeRO-1, arXiv:1910.02054). Each bucket is, and not each
            kind, so that one can be reduced and scattered as soon as its gradients are there.
    """
    buckets: list[Bucket] = []
    start = 0
    for kind, run in groupby(range(len(places)), key=kinds.__getitem__):
        members = list(run)
        shards = kind.group.size if sharded else 1
        first, size = members[0], 0
        for number in members:
            size += places[number]
            if size >= least or number == members[-1]:
                end = start + _round_up(size, ALIGNMENT * shards)
                buckets.append(Bucket(kind, range(first, number + 1), start, end, shards))
                first, start, size = number + 1, end, 0
    return buckets


def _round_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
