"""The layout of parameters in the flat buffers: grouped by kind, with each kind divided into buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from launch.engines.torch_native.parallel.process_groups import Group, ParallelMesh
from launch.engines.torch_native.parallel.sharding import Sharding

ALIGNMENT = 64
"""Each parameter takes a multiple of this many elements. It aligns operands to 128 bytes, also in bfloat16, for kernels."""

BUCKET_ELEMENTS = 2**25
"""The least size of a bucket: 128 MiB in float32. Smaller buckets do not saturate the links between GPUs. Larger buckets leave
more to reduce after the backward pass. Megatron-Core's buckets have 40 million elements, those of PyTorch's DDP 25 MiB."""


@dataclass(frozen=True)
class Kind:
    """The properties that neighbouring parameters in the buffers share."""

    decays: bool
    group: Group
    """Data-parallel ranks, which have the same values and sum the gradients of their microbatches."""
    partial_groups: tuple[Group, ...]
    """Groups whose ranks have partial gradients, which must be summed first."""
    replicas: int
    """The number of ranks that have the same values."""


def classify_parameter(
    name: str, parameter: torch.Tensor, sharding: Sharding, mesh: ParallelMesh, tied: Group | None
) -> Kind:
    """Return the kind of parameter ``name``. The ranks of ``tied`` have the same values, but partial gradients."""
    group = mesh.expert_dp if sharding.axis == "ep" else mesh.dp
    partial_groups = [mesh.tp] if sharding.partial else []
    if tied is not None:
        partial_groups.append(tied)
    copies = mesh.tp.size if sharding.axis is None else 1
    copies *= tied.size if tied is not None else 1
    # Only matrices decay. Biases of experts have two dimensions.
    decays = parameter.dim() >= 2 and not name.endswith("bias")
    return Kind(decays, group, tuple(group for group in partial_groups if group.size > 1), group.size * copies)


def padded_size(parameter: torch.Tensor) -> int:
    """Return the number of elements that ``parameter`` takes in the buffers."""
    return _round_up(parameter.numel(), ALIGNMENT)


@dataclass(frozen=True)
class Bucket:
    """Elements ``start`` to ``end`` of the buffers. ``parameters`` are the indices of the parameters there."""

    kind: Kind
    parameters: range
    start: int
    end: int
    shards: int
    """The number of equal parts of the bucket. Each rank of ``kind.group`` updates one part; a single part is updated by
    all."""

    @property
    def owned(self) -> slice:
        """The elements that this rank updates."""
        length = (self.end - self.start) // self.shards
        start = self.start + self.kind.group.rank % self.shards * length
        return slice(start, start + length)

    @property
    def copies(self) -> int:
        """The number of ranks that update the same elements as this one, this rank included."""
        return self.kind.replicas // self.shards


def make_buckets(places: Sequence[int], kinds: Sequence[Kind], least: int, sharded: bool) -> list[Bucket]:
    """Divide parameters into buckets of at least ``least`` elements. The last bucket of a kind may be smaller.

    Args:
        places: padded size of every parameter, in elements.
        kinds: kind of every parameter; equal kinds are neighbours.
        sharded: whether each rank updates only a part of every bucket (ZeRO-1, arXiv:1910.02054). Buckets are sharded instead
            of kinds, so a bucket can be reduce-scattered as soon as its gradients are complete.
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
