"""Sums over ranks: gradients, bucket by bucket while the backward pass goes on, updated weights, and small tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from launch.engines.torch_native.parallel.buckets import Bucket
from launch.engines.torch_native.parallel.collectives import all_gather_single, reduce_scatter_single
from launch.engines.torch_native.parallel.process_groups import Group


class Reduction:
    """Replaces gradients by their sums over ranks, once a step; of a sharded bucket only in the part this rank owns.

    Buckets go in one order on all ranks, whatever order their gradients come in: that in which the last gradient of each
    is expected. Those whose gradient is a sum itself go when the backward pass has ended: pipeline stages end theirs one
    after another, and one that waited in its own for the others' share of an embedding would keep them from beginning.
    What tensor-parallel groups share (norms, biases, routers) is small.

    The sums of more than two ranks depend in their last bits on how parameters are cut into buckets, since a collective
    adds in an order that depends on the place in its buffer.

    Args:
        gradients: the flat buffer.
        expected: of every parameter, when its gradient is expected, counted from the first.
        names: of every parameter.
    """

    def __init__(
        self, gradients: torch.Tensor, buckets: Sequence[Bucket], expected: Sequence[int], names: Sequence[str]
    ) -> None:
        self._gradients = gradients
        self._names = names
        self._buckets = sorted(
            buckets, key=lambda bucket: (bool(bucket.kind.sums), max(expected[number] for number in bucket.parameters))
        )
        self._place = {number: i for i, bucket in enumerate(self._buckets) for number in bucket.parameters}
        self._begin()

    def ready(self, parameter: int) -> None:
        """A parameter has its gradients of all micro-batches; all ranks say so of each at most once a step.

        Raises:
            RuntimeError: said twice in a step. The first time its bucket may have gone without what came since.
        """
        awaited = self._awaited[self._place[parameter]]
        if parameter not in awaited:
            name = self._names[parameter]
            raise RuntimeError(
                f"{name} had its last gradient of this step before: accumulate with last=True once a step"
            )
        awaited.remove(parameter)
        while self._begun < len(self._buckets) and not self._awaited[self._begun]:
            if self._buckets[self._begun].kind.sums:
                break
            self._reduce_next()

    def finish(self) -> None:
        """Reduce what has not begun, and wait for all: the device does, the host only on gloo."""
        while self._begun < len(self._buckets):
            self._reduce_next()
        for work in self._works:
            work.wait()
        self._begin()

    def _begin(self) -> None:
        self._begun = 0
        self._awaited = [set(bucket.parameters) for bucket in self._buckets]
        self._works: list[dist.Work] = []

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._begun]
        self._begun += 1
        gradients, group = self._gradients[bucket.start : bucket.end], bucket.kind.group.process_group
        for own in bucket.kind.sums:
            total(own, gradients)
        if group is None:
            return
        if bucket.shards > 1:
            owned = self._gradients[bucket.owned]
            self._works.append(reduce_scatter_single(owned, gradients, group=group, async_op=True))
        else:
            self._works.append(dist.all_reduce(gradients, group=group, async_op=True))


def gather_owned(weights: torch.Tensor, buckets: Sequence[Bucket]) -> None:
    """Fill in the parts of sharded buckets that other ranks own."""
    works = [
        all_gather_single(
            weights[bucket.start : bucket.end],
            weights[bucket.owned],
            group=bucket.kind.group.process_group,
            async_op=True,
        )
        for bucket in buckets
        if bucket.shards > 1
    ]
    for work in works:
        work.wait()


def total(group: Group, *tensors: torch.Tensor) -> None:
    """Replace each tensor by its sum over the ranks."""
    if group.process_group is not None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group.process_group)


def average(group: Group, *tensors: torch.Tensor) -> None:
    """Replace each tensor by its mean over the ranks."""
    total(group, *tensors)
    for tensor in tensors:
        tensor.div_(group.size)
