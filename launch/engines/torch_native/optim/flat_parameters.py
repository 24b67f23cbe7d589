"""Master weights and main gradients, in one flat buffer each. Parameters are views of the buffers.

So the norm, the clipping, the reduction over ranks and the update take few operations for any number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from launch.contract.spec import Parallelism
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.optim.accumulation import FusedAccumulation
from launch.engines.torch_native.optim.split_masters import join
from launch.engines.torch_native.parallel.buckets import (
    BUCKET_ELEMENTS,
    Bucket,
    Kind,
    classify_parameter,
    make_buckets,
    padded_size,
)
from launch.engines.torch_native.parallel.data_parallel import GradientReduction, gather_weights
from launch.engines.torch_native.parallel.process_groups import Group, ParallelMesh, make_mesh
from launch.engines.torch_native.parallel.sharding import find_shardings


@dataclass(frozen=True)
class OptimizerShard:
    """Contiguous elements that this rank updates: views of the flat buffers, each (elements,)."""

    decays: bool
    copies: int
    """The number of ranks that update the same elements."""
    compute: torch.Tensor
    weights: torch.Tensor
    """Master weights; with a lean optimizer their low 16 bits, int16."""
    gradients: torch.Tensor
    parts: tuple[tuple[str, slice], ...]
    """The names of parameters, or of their parts, and their elements."""

    @property
    def is_shared(self) -> bool:
        """Whether master and compute weights are the same tensor."""
        return self.weights.data_ptr() == self.compute.data_ptr()

    def cut(self, most: int) -> Iterator[OptimizerShard]:
        """Yield shards of at most ``most`` elements, which together are this one."""
        for first in range(0, len(self.weights), most):
            place = slice(first, first + most)
            yield replace(
                self, compute=self.compute[place], weights=self.weights[place], gradients=self.gradients[place],
                parts=tuple(_parts_within(self.parts, place)),
            )  # fmt: skip

    def masters(self, place: slice) -> torch.Tensor:
        """Return the master weights of the elements ``place``, shape (elements,): a view or a copy."""
        weights = self.weights[place]
        return weights if weights.is_floating_point() else join(self.compute[place], weights)


Add = Callable[[torch.Tensor, torch.Tensor, float, bool, bool], None]
"""Adds a gradient in place: (main gradient, gradient, scale, whether it is the step's first, and its last). Both tensors have
one shape."""


def _add(into: torch.Tensor, gradient: torch.Tensor, scale: float, first: bool, last: bool) -> None:
    into.add_(gradient, alpha=scale)


class FlatParameters:
    """Master weights and main gradients of a module.

    Master weights have at least float32. If the module computes in their precision, its parameters are views of them.
    After ``finish`` the gradients are means over data-parallel ranks. An expert's gradient covers the tokens of its whole
    expert-parallel group, so its sum over ranks has the same divisor as all others.

    With ``distributed_optimizer`` a rank has master weights only for its part of each bucket. After ``finish`` its gradients
    are valid only for that part.

    Args:
        gradient_dtype: type of main gradients, by default that of the master weights.
        tied: for each parameter that other pipeline stages also hold, by name, the group of these stages and this rank's: an
            embedding that is also the output layer. The gradients of the group are summed.
        bucket_elements: the least number of gradients to reduce at once.
        fused: adds gradients; by default, main gradients are cleared before the step.
        lean: store only the low 16 bits of master weights, in addition to the bfloat16 weights (split_masters.py).
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh | None = None,
        gradient_dtype: torch.dtype | None = None,
        *,
        distributed_optimizer: bool = False,
        tied: Mapping[str, Group] = {},
        bucket_elements: int = BUCKET_ELEMENTS,
        fused: FusedAccumulation | None = None,
        lean: bool = False,
    ) -> None:
        # The order of the backward pass.
        named = list(reversed(list(module.named_parameters())))
        first, shardings = named[0][1], find_shardings(module)
        self.mesh = mesh or make_mesh(RankPlace(0, 1, first.device), Parallelism())
        kinds = [
            classify_parameter(name, parameter, shardings[name], self.mesh, tied.get(name)) for name, parameter in named
        ]
        order = _group_by_kind(kinds)
        self.parameters = [named[i][1] for i in order]
        places = [padded_size(parameter) for parameter in self.parameters]
        self._buckets = make_buckets(places, [kinds[i] for i in order], bucket_elements, distributed_optimizer)
        self._names = [named[i][0] for i in order]
        self.is_lean = lean
        self.precision = torch.promote_types(first.dtype, torch.float32)
        """The type in which master weights are updated."""
        self._allocate(gradient_dtype)
        self._reduction = GradientReduction(self.gradients, self._buckets, order, self._names)
        self._accumulation = _Accumulation(self._gradient_views, self._reduction, first.new_zeros(()), fused or _add)
        self._fused = fused
        for number, parameter in enumerate(self.parameters):
            parameter.register_hook(partial(self._accumulation.take, number))

    def _allocate(self, gradient_dtype: torch.dtype | None) -> None:
        first, size, dtype = self.parameters[0], self._buckets[-1].end, self.precision
        self._compute = torch.zeros(size, dtype=first.dtype, device=first.device)
        for view, parameter in zip(self._views(self._compute), self.parameters, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        owned = _owned(self._buckets)
        lengths = [part.stop - part.start for _, part in owned]
        shared = first.dtype == dtype and sum(lengths) == size
        kept = torch.int16 if self.is_lean else dtype
        self.weights = self._compute if shared else self._compute.new_zeros(sum(lengths), dtype=kept)
        self.gradients = torch.zeros_like(self._compute, dtype=gradient_dtype or dtype)
        self._gradient_views = self._views(self.gradients)
        self.shards = [
            OptimizerShard(
                bucket.kind.decays,
                bucket.copies,
                self._compute[part],
                weights,
                self.gradients[part],
                tuple(self._parts_of(part)),
            )
            for (bucket, part), weights in zip(owned, self.weights.split(lengths), strict=True)
        ]
        for shard in () if self.is_lean else self.shards:
            shard.weights.copy_(shard.compute)

    def owned(self) -> Iterator[tuple[str, OptimizerShard, slice]]:
        """Yield the parts of parameters that this rank updates: the parameter's name, a shard, and the slice of the shard."""
        return ((name, shard, place) for shard in self.shards for name, place in shard.parts)

    def stored_weights(self) -> list[torch.Tensor]:
        """Return master and compute weights, each (elements,); one tensor if they are the same."""
        return [self.weights] if self.weights is self._compute else [self.weights, self._compute]

    def gathered_weights(self) -> list[torch.Tensor]:
        """Return the compute weights, (elements,), if other ranks update some of them; otherwise nothing."""
        return [] if len(self.weights) == len(self._compute) else [self._compute]

    @contextmanager
    def accumulate_gradients(self, share: float, first: bool = False, last: bool = False) -> Iterator[None]:
        """Make ``torch.autograd.grad`` add ``share`` times each gradient to its main gradient as soon as it is computed.

        ``grad`` then returns zeros instead of gradients, so it does not hold the gradients of the whole model.

        Args:
            first: these are the first gradients of the step for these parameters. Unless they are the last too, others must
                follow if the accumulation is fused.
            last: these are the last gradients of the step for these parameters. Their buckets are reduced over ranks
                during the backward pass. Otherwise ``finish`` reduces them.

        Raises:
            RuntimeError: from the backward pass, if a parameter already had its last gradient of the step.
        """
        self._accumulation.scale = share / self.mesh.dims.dp
        self._accumulation.first, self._accumulation.last = first, last
        self._accumulation.stream = torch.cuda.current_stream() if self.gradients.is_cuda else None
        try:
            yield
        except BaseException:
            self._reduction.begin()
            raise
        finally:
            self._accumulation.scale = None

    def clear_gradients(self) -> None:
        """Set the main gradients to zero, unless the first gradients of a step overwrite them."""
        if self._fused is None:
            self.gradients.zero_()

    def squared_norm(self) -> torch.Tensor | None:
        """Return the sum of the squares of the main gradients, shape (), if the last microbatch kept it; otherwise None."""
        return None if self._fused is None else self._fused.squared_norm()

    def finish(self) -> None:
        """Reduce the accumulated gradients over ranks. A collective call."""
        self._reduction.finish()

    def write_compute_weights(self) -> None:
        """Round the master weights to the compute weights of all ranks. A collective call."""
        if self.weights is not self._compute:
            torch._foreach_copy_([s.compute for s in self.shards], [s.weights for s in self.shards])
        self.gather_compute_weights()

    def gather_compute_weights(self) -> None:
        """All-gather the compute weights after each rank has updated its part. A collective call."""
        gather_weights(self._compute, self._buckets)

    def _parts_of(self, owned: slice) -> Iterator[tuple[str, slice]]:
        """Yield the parameters with elements in ``owned``, and the places of these elements relative to its start."""
        for number, start in self._starts():
            first, last = max(start, owned.start), min(start + self.parameters[number].numel(), owned.stop)
            if first < last:
                yield self._names[number], slice(first - owned.start, last - owned.start)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of ``flat``, (elements,), for each parameter, in the parameter's shape."""
        shaped = ((self.parameters[number], start) for number, start in self._starts())
        return [flat[start : start + one.numel()].view(one.shape) for one, start in shaped]

    def _starts(self) -> Iterator[tuple[int, int]]:
        """Yield each parameter's index and the index of its first element in the buffers."""
        for bucket in self._buckets:
            start = bucket.start
            for number in bucket.parameters:
                yield number, start
                start += padded_size(self.parameters[number])


@dataclass(eq=False)
class _Accumulation:
    """The state of the parameters' hooks.

    It has no reference to parameters. They would form a reference cycle with their hooks, and only the garbage collector would
    free the model's memory.
    """

    views: Sequence[torch.Tensor]
    reduction: GradientReduction
    zero: torch.Tensor
    add: Add
    scale: float | None = None
    """None while hooks are inactive."""
    first: bool = False
    last: bool = False
    stream: torch.cuda.Stream | None = None
    """The stream of the backward pass; None on a CPU."""

    def take(self, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add ``gradient`` of parameter ``number``, and return zeros of its shape.

        Autograd calls this tensor hook with the sum over all uses of the parameter.
        """
        # A hook of the AccumulateGrad node would run on the stream where the node was created, which breaks a capture.
        if self.scale is None:
            return None
        # Autograd calls this hook on the stream where the parameter was first used, or on the capture's stream after a capture.
        # A reduction begins on the stream of the pass, and would not wait for an addition on another stream.
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self.add(self.views[number], gradient, self.scale, self.first, self.last)
            if self.last:
                self.reduction.ready(number)
        return self.zero.expand_as(gradient)


def _parts_within(parts: Iterable[tuple[str, slice]], place: slice) -> Iterator[tuple[str, slice]]:
    """Yield what lies within ``place`` of each of ``parts``, relative to the start of ``place``. Names stay unique."""
    for name, part in parts:
        first, last = max(part.start, place.start), min(part.stop, place.stop)
        if first < last:
            label = name if first == part.start else f"{name} from element {first - part.start}"
            yield label, slice(first - place.start, last - place.start)


def _group_by_kind(kinds: Sequence[Kind]) -> list[int]:
    """Return the indices of ``kinds``, grouped by equal kind and otherwise in order."""
    first: dict[Kind, int] = {}
    for number, kind in enumerate(kinds):
        first.setdefault(kind, number)
    return sorted(range(len(kinds)), key=lambda number: first[kinds[number]])


def _owned(buckets: Sequence[Bucket]) -> list[tuple[Bucket, slice]]:
    """Return the elements that this rank updates. Neighbouring slices of one kind are merged."""
    owned: list[tuple[Bucket, slice]] = []
    for bucket in buckets:
        part = bucket.owned
        if owned and owned[-1][0].kind == bucket.kind and owned[-1][1].stop == part.start:
            part = slice(owned.pop()[1].start, part.stop)
        owned.append((bucket, part))
    return owned
