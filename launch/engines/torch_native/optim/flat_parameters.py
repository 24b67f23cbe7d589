"""Master weights and main gradients: one flat buffer each, of which parameters are views.

Flat, so that the norm, the clipping, the reduction over ranks and the update are a few operations whatever the number
of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from launch.contract.parallel_dims import ParallelDims
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.parallel.buckets import BUCKET_ELEMENTS, Bucket, Kind, cut, kind_of, place
from launch.engines.torch_native.parallel.data_parallel import Reduction, gather_owned
from launch.engines.torch_native.parallel.process_groups import Group, ParallelMesh, make_mesh
from launch.engines.torch_native.parallel.sharding import WHOLE, Sharding


@dataclass(frozen=True)
class OptimizerShard:
    """Successive elements that this rank updates, views of the buffers."""

    decays: bool
    copies: int
    """How many ranks update the same elements."""
    compute: torch.Tensor
    weights: torch.Tensor
    gradients: torch.Tensor


Add = Callable[[torch.Tensor, torch.Tensor, float, bool], None]


def _add(into: torch.Tensor, gradient: torch.Tensor, scale: float, first: bool) -> None:
    into.add_(gradient, alpha=scale)


class FlatParameters:
    """Master weights and main gradients of a module, or of all a rank's modules in one that holds them.

    Masters are of at least float32; where the module computes in their precision its parameters are views of the
    masters themselves. Gradients are of ``gradient_dtype``, by default that of the masters. What is accumulated over a
    step is, once finished, the mean over data-parallel ranks. An expert's gradient on a rank is of the tokens of its
    whole expert-parallel group, so that its sum over ranks is divided by the same number as that of all others.

    With ``distributed_optimizer`` a rank has masters of the part of each bucket that it updates, and after ``finish``
    gradients of that part alone.

    Args:
        shardings: of every parameter by its name; None where all are held whole.
        tied: by its name, the group of a parameter that other pipeline stages hold too, this rank's stage included: an
            embedding that is also the output layer. The gradients of all are summed.
        bucket_elements: how many gradients are reduced at once, at least.
        add: (main gradient, gradient, share, whether it is the step's first) adds the share of a gradient; None adds to
            what was cleared.
    """

    def __init__(
        self,
        module: nn.Module,
        shardings: Mapping[str, Sharding] | None = None,
        mesh: ParallelMesh | None = None,
        gradient_dtype: torch.dtype | None = None,
        *,
        distributed_optimizer: bool = False,
        tied: Mapping[str, Group] = {},
        bucket_elements: int = BUCKET_ELEMENTS,
        add: Add | None = None,
    ) -> None:
        # In the order in which a backward pass comes by them.
        named = list(reversed(list(module.named_parameters())))
        first = named[0][1]
        self.mesh = mesh or make_mesh(RankPlace(0, 1, first.device), ParallelDims())
        kinds = [
            kind_of(name, parameter, shardings[name] if shardings else WHOLE, self.mesh, tied.get(name))
            for name, parameter in named
        ]
        order = _side_by_side(kinds)
        self.parameters = [named[i][1] for i in order]
        places = [place(parameter) for parameter in self.parameters]
        self._buckets = cut(places, [kinds[i] for i in order], bucket_elements, distributed_optimizer)
        self._allocate(torch.promote_types(first.dtype, torch.float32), gradient_dtype)
        self._reduction = Reduction(self.gradients, self._buckets, order, [named[i][0] for i in order])
        self._accumulation = _Accumulation(self._gradient_views, self._reduction, first.new_zeros(()), add or _add)
        self.is_cleared = add is None
        """Whether main gradients are to be cleared between steps."""
        for number, parameter in enumerate(self.parameters):
            parameter.register_hook(partial(self._accumulation.take, number))

    def _allocate(self, dtype: torch.dtype, gradient_dtype: torch.dtype | None) -> None:
        first, size = self.parameters[0], self._buckets[-1].end
        self._compute = torch.zeros(size, dtype=first.dtype, device=first.device)
        for view, parameter in zip(self._views(self._compute), self.parameters, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        owned = _owned(self._buckets)
        lengths = [part.stop - part.start for _, part in owned]
        same = first.dtype == dtype and sum(lengths) == size
        self.weights = self._compute if same else self._compute.new_empty(sum(lengths), dtype=dtype)
        self.gradients = torch.zeros_like(self._compute, dtype=gradient_dtype or dtype)
        self._gradient_views = self._views(self.gradients)
        self.stretches = [
            OptimizerShard(bucket.kind.decays, bucket.copies, self._compute[part], weights, self.gradients[part])
            for (bucket, part), weights in zip(owned, self.weights.split(lengths), strict=True)
        ]
        for stretch in self.stretches:
            stretch.weights.copy_(stretch.compute)

    def gradients_of(self, part: nn.Module) -> list[torch.Tensor]:
        """The main gradients of the parameters of ``part``, which is of the module: views."""
        views = {id(parameter): view for parameter, view in zip(self.parameters, self._gradient_views, strict=True)}
        return [views[id(parameter)] for parameter in part.parameters()]

    @contextmanager
    def accumulating(self, share: float, first: bool = False, last: bool = False) -> Iterator[None]:
        """Within it, ``torch.autograd.grad`` adds ``share`` times the gradient of every parameter it is asked for, as
        soon as it has it, and returns zeros in its place, so that it need not hold the gradients of a whole model.

        Args:
            first: these parameters had none yet in this step.
            last: these parameters get no more gradients in this step: they are reduced over ranks while the backward
                pass goes on. Where it is never said, ``finish`` reduces all.

        Raises:
            RuntimeError: from the backward pass, of a parameter that had its last gradient of the step already.
        """
        self._accumulation.scale = share / self.mesh.dims.dp
        self._accumulation.first, self._accumulation.last = first, last
        self._accumulation.stream = torch.cuda.current_stream() if self.gradients.is_cuda else None
        try:
            yield
        finally:
            self._accumulation.scale = None

    def finish(self) -> None:
        """Make of what was accumulated the gradients of the step. A collective call."""
        self._reduction.finish()

    def publish(self) -> None:
        """Round the masters to what the module computes with. A collective call."""
        if self.weights is not self._compute:
            torch._foreach_copy_([s.compute for s in self.stretches], [s.weights for s in self.stretches])
        self.gather()

    def gather(self) -> None:
        """Give what this rank has updated of the compute weights to those that hold them too. A collective call."""
        gather_owned(self._compute, self._buckets)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views = []
        for bucket in self._buckets:
            start = bucket.start
            for number in bucket.parameters:
                parameter = self.parameters[number]
                views.append(flat[start : start + parameter.numel()].view(parameter.shape))
                start += place(parameter)
        return views


class _Accumulation:
    """What the hooks of parameters do. It does not know the parameters: in a cycle with their hooks, a model's memory
    would wait for the garbage collector.
    """

    def __init__(self, views: Sequence[torch.Tensor], reduction: Reduction, zero: torch.Tensor, add: Add) -> None:
        self._add = add
        self._views = views
        self._reduction = reduction
        self._zero = zero
        self.scale: float | None = None
        """None while hooks do nothing."""
        self.first = self.last = False
        self.stream: torch.cuda.Stream | None = None
        """On which the pass runs; None on a CPU."""

    def take(self, number: int, gradient: torch.Tensor) -> torch.Tensor | None:
        # Autograd calls it as a hook of the tensor, with the sum over all uses of a parameter. A hook of its
        # AccumulateGrad node would run on the stream that the node was made on, which breaks a capture.
        if self.scale is None:
            return None
        # Autograd calls it on the stream on which the parameter was first used, and one that was captured keeps that of
        # its capture: what is added there a reduction begun on another stream would not wait for.
        with torch.cuda.stream(self.stream):
            self._add(self._views[number], gradient, self.scale, self.first)
            if self.last:
                self._reduction.ready(number)
        return self._zero.expand_as(gradient)


def _side_by_side(kinds: Sequence[Kind]) -> list[int]:
    """Their numbers, those of a kind side by side and otherwise in order."""
    first: dict[Kind, int] = {}
    for number, kind in enumerate(kinds):
        first.setdefault(kind, number)
    return sorted(range(len(kinds)), key=lambda number: first[kinds[number]])


def _owned(buckets: Sequence[Bucket]) -> list[tuple[Bucket, slice]]:
    """What this rank updates, of which neighbours of a kind are one."""
    owned: list[tuple[Bucket, slice]] = []
    for bucket in buckets:
        part = bucket.owned
        if owned and owned[-1][0].kind == bucket.kind and owned[-1][1].stop == part.start:
            part = slice(owned.pop()[1].start, part.stop)
        owned.append((bucket, part))
    return owned
