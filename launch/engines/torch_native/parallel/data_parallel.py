"""Collectives over ranks: reduce gradients bucket by bucket during the backward pass, gather weights, reduce small tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from launch.engines.torch_native.parallel.buckets import Bucket
from launch.engines.torch_native.parallel.collectives import all_gather_single, reduce_scatter_single
from launch.engines.torch_native.parallel.process_groups import Group


class GradientReduction:
    """Replaces gradients by their sums over ranks, once per step. In a sharded bucket only this rank's part is then valid.

    All ranks reduce buckets in the same order: by when the last gradient of each bucket is expected. Buckets with partial
    gradients wait for the end of the backward pass. Otherwise a pipeline stage would wait inside its backward pass for the
    other end's share of a tied embedding, and the stages would deadlock. Other partial gradients (norms, biases, routers) are
    small.

    With more than two ranks, the last bits of the sums depend on the division into buckets, because the order in which a
    collective adds depends on the position in its buffer.

    Args:
        gradients: the flat buffer, shape (elements,).
        expected: for every parameter, the position of its gradient in the backward pass.
        names: the name of every parameter, for messages.
    """

    def __init__(
        self, gradients: torch.Tensor, buckets: Sequence[Bucket], expected: Sequence[int], names: Sequence[str]
    ) -> None:
        self._gradients = gradients
        self._names = names
        self._buckets = sorted(
            buckets,
            key=lambda bucket: (
                bool(bucket.kind.partial_groups),
                max(expected[number] for number in bucket.parameters),
            ),
        )
        self._place = {number: i for i, bucket in enumerate(self._buckets) for number in bucket.parameters}
        self.begin()

    def ready(self, parameter: int) -> None:
        """Note that a parameter has its gradients of all microbatches, and begin the reductions that this allows.

        Raises:
            RuntimeError: the parameter was already ready in this step, so its bucket may have been reduced too early.
        """
        awaited = self._awaited[self._place[parameter]]
        if parameter not in awaited:
            name = self._names[parameter]
            raise RuntimeError(
                f"{name} already had its last gradient of this step: accumulate with last=True only once a step"
            )
        awaited.remove(parameter)
        while self._begun < len(self._buckets) and not self._awaited[self._begun]:
            if self._buckets[self._begun].kind.partial_groups:
                break
            self._reduce_next()

    def finish(self) -> None:
        """Reduce the remaining buckets and wait for all. With NCCL only the stream waits; with gloo the host waits."""
        while self._begun < len(self._buckets):
            self._reduce_next()
        for work in self._works:
            work.wait()
        self.begin()

    def begin(self) -> None:
        """Begin a step, whether or not the previous one has ended."""
        self._begun = 0
        self._awaited = [set(bucket.parameters) for bucket in self._buckets]
        self._works: list[dist.Work] = []

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._begun]
        self._begun += 1
        gradients, group = self._gradients[bucket.start : bucket.end], bucket.kind.group.process_group
        for partial_group in bucket.kind.partial_groups:
            all_reduce_sum(partial_group, gradients)
        if group is None:
            return
        if bucket.shards > 1:
            owned = self._gradients[bucket.owned]
            self._works.append(reduce_scatter_single(owned, gradients, group=group, async_op=True))
        else:
            self._works.append(dist.all_reduce(gradients, group=group, async_op=True))


def gather_weights(weights: torch.Tensor, buckets: Sequence[Bucket]) -> None:
    """All-gather sharded buckets of ``weights``, (elements,), in place. Each rank has updated its part."""
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


def all_reduce_sum(group: Group, tensor: torch.Tensor) -> None:
    """Replace ``tensor``, (...), by its sum over the ranks, in place."""
    if group.process_group is not None:
        dist.all_reduce(tensor, group=group.process_group)


def all_reduce_mean(group: Group, tensor: torch.Tensor) -> None:
    """Replace ``tensor``, (...), by its mean over the ranks, in place."""
    all_reduce_sum(group, tensor)
    tensor.div_(group.size)
