"""Imitate graphed callables without a GPU: compute again at each replay, in memory that behaves like graph memory.

A callable returns its outputs and gradients in the same places each time. They become NaN as soon as graphs that
share their memory may have overwritten them: outputs after the backward pass, gradients of parameters with the next
replay, gradients of inputs with the next forward pass. Replays must come in the captured order, if one was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.func import functional_call

from launch.contract.spec import RunSpec
from launch.engines.protocol import RankPlace
from launch.engines.torch_native.engine import TorchNativeEngine
from launch.engines.torch_native.graphs import layer_callables
from launch.engines.torch_native.graphs.layer_parts import Part
from tests.numerics.tiny import CPU, train

Tensors = tuple[torch.Tensor, ...]


class Pool:
    """Memory that graphs share, and the order of their replays as pairs (callable, whether it is a forward pass)."""

    def __init__(self) -> None:
        self.graphs: list[Graphed] = []
        self.order: Iterator[tuple[int, bool]] | None = None

    def replayed(self, graph: Graphed, forward: bool) -> None:
        if self.order is not None:
            assert (self.graphs.index(graph), forward) == next(self.order), (
                "replays are in a different order than captured"
            )
        for other in self.graphs:
            spoil(other.gradients if forward else other.gradients[other.part.inputs :])


def spoil(memory: Sequence[torch.Tensor]) -> None:
    for tensor in memory:
        tensor.fill_(math.nan if tensor.is_floating_point() else -1)


class Graphed:
    """The callable of one part, for one micro-batch in flight."""

    def __init__(self, part: Part, sample: Tensors, pool: Pool) -> None:
        self.part = part
        self.parameters = dict(part.named_parameters())
        self.pool = pool
        self.running: tuple[list[torch.Tensor], Tensors] | None = None
        with torch.no_grad():
            self.outputs: Tensors = part(*sample)
        self.gradients = [torch.zeros_like(x) for x in (*sample, *self.parameters.values())]
        pool.graphs.append(self)

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        outputs: Tensors = Replay.apply(self, *inputs, *self.parameters.values())  # type: ignore[no-untyped-call]
        return outputs

    def forward(self, inputs: Tensors) -> Tensors:
        assert self.running is None, "its memory belongs to a micro-batch that is in flight"
        self.pool.replayed(self, forward=True)
        leaves = [x.detach().requires_grad_() for x in (*inputs, *self.parameters.values())]
        held = dict(zip(self.parameters, leaves[len(inputs) :], strict=True))
        with torch.enable_grad():
            outputs: Tensors = functional_call(self.part, held, tuple(leaves[: len(inputs)]))
        self.running = leaves, outputs
        for static, output in zip(self.outputs, outputs, strict=True):
            static.copy_(output.detach())
        return tuple(static.detach() for static in self.outputs)

    def backward(self, gradients: Tensors) -> Tensors:
        assert self.running is not None
        self.pool.replayed(self, forward=False)
        (leaves, outputs), self.running = self.running, None
        differentiated = [i for i, output in enumerate(outputs) if output.requires_grad]
        found = torch.autograd.grad(
            [outputs[i] for i in differentiated], leaves, [gradients[i] for i in differentiated]
        )
        for static, gradient in zip(self.gradients, found, strict=True):
            static.copy_(gradient)
        spoil(self.outputs)
        return tuple(static.detach() for static in self.gradients)


class Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphed: Graphed, *inputs: torch.Tensor) -> Tensors:
        ctx.graphed = graphed
        return graphed.forward(inputs[: graphed.part.inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.graphed.backward(gradients)


def of_torch(parts: tuple[Part, ...], samples: tuple[Tensors, ...], num_warmup_iters: int) -> tuple[Graphed, ...]:
    pool = Pool()
    return tuple(Graphed(part, sample, pool) for part, sample in zip(parts, samples, strict=True))


def of_transformer_engine(
    parts: tuple[Part, ...],
    samples: list[Tensors],
    *,
    _order: Sequence[int],
    _num_layers_per_chunk: Sequence[int],
    **settings: Any,
) -> list[Graphed]:
    """Order callables by chunk, then by micro-batch, then by layer."""
    pool, remaining, given = Pool(), iter(parts), iter(samples)
    micro_batches = len(_order) // len(_num_layers_per_chunk) // 2
    places: dict[tuple[int, int], list[int]] = {}
    for chunk, count in enumerate(_num_layers_per_chunk):
        of_chunk = [next(remaining) for _ in range(count)]
        for number in range(micro_batches):
            places[chunk, number] = [len(pool.graphs) + i for i in range(count)]
            for part in of_chunk:
                Graphed(part, next(given), pool)
    replays: list[tuple[int, bool]] = []
    done: dict[int, int] = {}
    for entry in _order:
        of_micro_batch = places[abs(entry) - 1, done.setdefault(entry, 0)]
        done[entry] += 1
        replays += [(i, entry > 0) for i in (of_micro_batch if entry > 0 else reversed(of_micro_batch))]
    pool.order = cycle(replays)
    return pool.graphs


@contextmanager
def graphs_on_cpu() -> Iterator[None]:
    make: Callable[[], Callable[..., Any]] = lambda: of_transformer_engine  # noqa: E731
    with (
        mock.patch.object(torch.cuda, "synchronize", lambda: None),
        mock.patch.object(torch.cuda, "make_graphed_callables", of_torch),
        mock.patch.object(layer_callables, "_make_graphed_callables", make),
    ):
        yield


def train_graphed(spec: RunSpec) -> dict[str, Any]:
    """Return a rank's losses, gradient norms and final masters, and the evidence of its capture."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with graphs_on_cpu():
        engine = TorchNativeEngine(spec, RankPlace(rank, spec.parallelism.world_size, CPU))
        results = train(engine, spec)
    stats = engine.graph_stats()
    engine.close()
    return {
        "steps": [(result.loss.item(), result.grad_norm.item()) for result in results],
        "weights": engine.flat_parameters.weights,
        "graphs": stats.graphs,
        "proven": stats.proven,
    }
