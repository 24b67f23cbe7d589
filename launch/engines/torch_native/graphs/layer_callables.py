"""Layers, or parts of them, as graphed callables: PyTorch's own, or Transformer Engine's.

A callable's static memory (outputs, saved activations, gradients) belongs to one micro-batch from its forward to its
backward; each micro-batch in flight has callables of its own. Gradients of parameters are handed out in static memory
too (pytorch/pytorch#181723): they are added to the main gradients in the hook that sees them first, before anything is
replayed again.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from launch.contract.errors import EnvironmentFault
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import RunSpec
from launch.engines.protocol import StepKind
from launch.engines.torch_native.decoder import RunLayer
from launch.engines.torch_native.graphs.layer_parts import Part, parts_of, put_together
from launch.engines.torch_native.graphs.protocol import Ran, check_input
from launch.engines.torch_native.parallel.pipeline_schedule import Action, in_flight_by_chunk
from launch.engines.torch_native.train_step import Iteration

WARMUP_PASSES = 3
"""Of each callable before its capture: cuBLAS and Triton choose kernels in them."""

Named = tuple[str, str]
"""A layer and one of its parts."""


@dataclass(frozen=True)
class _Captured:
    """One part's callable for one micro-batch in flight."""

    part: Part
    call: Callable[..., Any]
    sample: torch.Tensor


Callables = Sequence[Sequence[Mapping[Named, _Captured]]]
"""By chunk, by micro-batch in flight."""


class GraphedLayers:
    def __init__(self, iteration: Iteration, spec: RunSpec) -> None:
        self.capture_step = spec.cuda_graph.warmup_steps
        self._iteration = iteration
        self._impl = spec.cuda_graph.impl
        self._scope = spec.cuda_graph.scope
        self._micro_batches = spec.num_microbatches
        self._callables: Callables = []
        self._replays = self._expected = 0
        self._capture_seconds = 0.0

    def run(self, step: int, batch: torch.Tensor) -> Ran:
        kind: StepKind = "warmup" if step < self.capture_step else "steady" if self._callables else "capture"
        if kind == "capture":
            self._capture(batch[0])
        if kind != "warmup":
            self._expected += self._parts * self._micro_batches
        return Ran(*self._iteration.run(batch), kind)

    @property
    def _parts(self) -> int:
        return sum(len(in_flight[0]) for in_flight in self._callables)

    def _capture(self, tokens: torch.Tensor) -> None:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        # Parameters keep the stream of this capture; main gradients are added up on the pass's own whatever that is.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        capture = _by_transformer_engine if self._impl == "transformer_engine" else _by_torch
        actions = self._iteration.pipeline.actions
        self._callables = capture(lambda chunk: self._parts_of(chunk, tokens), self._sample(), actions)
        self._iteration.graphed = self._graphed
        torch.cuda.synchronize()
        self._capture_seconds = time.perf_counter() - begun

    def _parts_of(self, chunk: int, tokens: torch.Tensor) -> dict[Named, Part]:
        """New ones each time: PyTorch's callables take the place of a part's forward."""
        decoder = self._iteration.chunks[chunk]
        positions = decoder.positions(
            tokens[:, :-1], torch.promote_types(self._iteration.pipeline.dtype, torch.float32)
        )
        return {
            (name, kind): part
            for name, layer in decoder.named_layers().items()
            for kind, part in parts_of(layer, self._scope, positions).items()
        }

    def _sample(self) -> torch.Tensor:
        """Random, since equal tokens would all go to the same experts; the run's own generators are left alone."""
        device, pipeline = self._iteration.mesh.device, self._iteration.pipeline
        generator = torch.Generator(device).manual_seed(0)
        return torch.randn(pipeline.shape, device=device, dtype=pipeline.dtype, generator=generator)

    def _graphed(self, chunk: int, micro_batch: int) -> Mapping[str, RunLayer]:
        in_flight = self._callables[chunk]
        calls: dict[str, dict[str, Callable[..., Any]]] = {}
        for (layer, kind), captured in in_flight[micro_batch % len(in_flight)].items():
            calls.setdefault(layer, {})[kind] = self._replaying(f"{kind} of layer {layer}", captured)
        layers = self._iteration.chunks[chunk].named_layers()
        return {name: put_together(layers[name], of_layer) for name, of_layer in calls.items()}

    def _replaying(self, name: str, captured: _Captured) -> Callable[..., Any]:
        def call(*inputs: torch.Tensor) -> Any:
            for tensor in inputs:
                check_input(f"the input of {name}", captured.sample, tensor)
            self._replays += 1
            return captured.part.rebuild(captured.call(*inputs))

        return call

    def stats(self) -> GraphStats:
        return GraphStats(
            impl=self._impl,
            effective_scope=self._scope,
            mechanism=_MECHANISMS[self._impl],
            graphs=sum(2 * len(calls) for in_flight in self._callables for calls in in_flight),
            replays=self._replays,
            expected_replays=self._expected,
            launches_per_step=2 * self._parts * self._micro_batches,
            capture_seconds=self._capture_seconds,
        )

    def close(self) -> None:
        self._callables = []
        self._iteration.graphed = lambda chunk, micro_batch: {}
        gc.collect()  # callables lie in cycles, and graphs in them hold communicators


_MECHANISMS = {
    "torch": "torch.cuda.make_graphed_callables, a forward and a backward graph for each part",
    "transformer_engine": "transformer_engine.pytorch.make_graphed_callables, a forward and a backward graph for each part",
}

PartsOf = Callable[[int], dict[Named, Part]]
"""Of a chunk."""


def _by_torch(parts_of_chunk: PartsOf, sample: torch.Tensor, actions: Sequence[Action]) -> Callables:
    """A memory pool for each micro-batch in flight: what one of them has freed at its capture, another's replay would
    overwrite, since they are captured one after the other and replayed in turn."""
    return [
        [_one_micro_batch(parts_of_chunk(chunk), sample) for _ in range(count)]
        for chunk, count in enumerate(in_flight_by_chunk(actions))
    ]


def _one_micro_batch(parts: dict[Named, Part], sample: torch.Tensor) -> dict[Named, _Captured]:
    samples = tuple(_inputs(part, sample) for part in parts.values())
    if not parts:
        return {}
    calls = torch.cuda.make_graphed_callables(tuple(parts.values()), samples, num_warmup_iters=WARMUP_PASSES)
    return {name: _Captured(part, call, sample) for (name, part), call in zip(parts.items(), calls, strict=True)}


def _by_transformer_engine(parts_of_chunk: PartsOf, sample: torch.Tensor, actions: Sequence[Action]) -> Callables:
    """All of a step in the order of the schedule, so that memory is shared by what is never alive at the same time.
    Without a pipeline one micro-batch is in flight at a time, and one set of callables does for all."""
    in_flight = in_flight_by_chunk(actions)
    chunks = [parts_of_chunk(chunk) for chunk in range(len(in_flight))]
    alone = in_flight == [1]
    count = 1 if alone else 1 + max(action.micro_batch for action in actions)
    order = [1, -1] if alone else [(a.chunk + 1) * (1 if a.kind == "forward" else -1) for a in actions]
    samples = [_inputs(part, sample) for parts in chunks for _ in range(count) for part in parts.values()]
    if not samples:
        return [[{}] for _ in chunks]
    calls = _make_graphed_callables()(
        tuple(part for parts in chunks for part in parts.values()),
        samples,
        sample_kwargs=[{} for _ in samples],
        num_warmup_iters=WARMUP_PASSES,
        _order=order,
        _num_layers_per_chunk=[len(parts) for parts in chunks],
        _reuse_graph_input_output_buffers=True,
    )
    # In the order of samples: chunk by chunk, in it micro-batch by micro-batch.
    given = iter(calls)
    return [
        [{name: _Captured(part, next(given), sample) for name, part in parts.items()} for _ in range(count)]
        for parts in chunks
    ]


def _inputs(part: Part, sample: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(sample.clone().requires_grad_() for _ in range(part.inputs))


def _make_graphed_callables() -> Callable[..., Any]:
    try:
        from transformer_engine.pytorch import make_graphed_callables
    except ImportError as error:
        raise EnvironmentFault(
            f"cuda_graph.impl='transformer_engine' needs the package transformer-engine, which cannot be imported here: "
            f"{error}; install it, or set cuda_graph.impl=torch"
        ) from error
    return cast(Callable[..., Any], make_graphed_callables)
