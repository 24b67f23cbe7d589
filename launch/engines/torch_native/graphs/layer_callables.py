"""Layers, or parts of them, as graphed callables of PyTorch or Transformer Engine.

One microbatch owns a callable's static memory (outputs, saved activations, gradients) from its forward to its backward pass. So
each microbatch in flight has its own callables.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch

from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import GraphedStep, StepOutput, check_input, replaced
from launch.engines.packages import import_package
from launch.engines.random_states import default_generators, random_states_kept
from launch.engines.torch_native.decoder import RunLayer
from launch.engines.torch_native.graphs.layer_parts import Part, assemble_layer, layer_parts
from launch.engines.torch_native.parallel.pipeline_schedule import in_flight_by_chunk
from launch.engines.torch_native.train_step import TrainStep

WARMUP_PASSES = 3
"""The passes of each callable before its capture. In these, cuBLAS and Triton choose kernels."""

Named = tuple[str, str]
"""The names of a layer and of one of its parts."""


@dataclass(frozen=True)
class _Captured:
    """The callable of one part for one microbatch in flight."""

    part: Part
    call: Callable[..., Any]
    sample: torch.Tensor


Callables = Sequence[Sequence[Mapping[Named, _Captured]]]
"""Callables by chunk, then by microbatch in flight."""

PartsOfChunk = Callable[[int], dict[Named, Part]]
"""Returns new parts of a chunk at each call, because a graphed callable replaces the ``forward`` of its part."""


class _LayerCallables(GraphedStep):
    """Replaces layers, or parts of them, by graphed callables.

    Parameter gradients are in static memory too, which the next replay overwrites (pytorch/pytorch#181723). The hooks of
    FlatParameters add them to the main gradients before that.
    """

    def __init__(self, spec: RunSpec, train_step: TrainStep) -> None:
        super().__init__(spec, train_step.forward_backward)
        self.scope = spec.cuda_graph.scope
        self._train_step = train_step
        self._products = train_step.chunks[0].context.products
        self._callables: Callables = []

    def capture(self, batch: torch.Tensor) -> StepOutput:
        with self._timing_capture():
            # AccumulateGrad nodes keep the stream of this capture, which is harmless: a hook adds gradients on the pass's
            # stream.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
            # The warm-up passes of callables draw numbers. Steps must continue with the numbers that the eager run would draw.
            modules = [module for chunk in self._train_step.chunks for module in chunk.modules()]
            with random_states_kept(default_generators(batch.device)), self._products.capture_of_layers(modules):
                self._callables = self.make_callables(lambda chunk: self._parts_of(chunk, batch[0]), self._sample())
            self._train_step.graphed = self._graphed
        self.graphs = sum(2 * len(calls) for in_flight in self._callables for calls in in_flight)
        self.replays_per_step = sum(len(in_flight[0]) for in_flight in self._callables) * self._microbatches
        return self.replay(batch)

    def uncaptured(self) -> AbstractContextManager[None]:
        return replaced(self._train_step, "graphed", lambda chunk, microbatch: {})

    def close(self) -> None:
        self._callables = []
        self._train_step.graphed = lambda chunk, microbatch: {}
        # Callables are in reference cycles, and their graphs hold communicators.
        gc.collect()

    @abstractmethod
    def make_callables(self, parts_of_chunk: PartsOfChunk, sample: torch.Tensor) -> Callables:
        """Capture the parts of all chunks of this rank.

        Args:
            sample: an input, (microbatch size, sequence or this rank's slice of it, hidden_size).
        """

    def _sample(self) -> torch.Tensor:
        """Return random activations, (microbatch size, sequence or this rank's shard, hidden_size).

        They are random because equal tokens would all go to the same experts. The run's own generators do not advance.
        """
        device, pipeline = self._train_step.mesh.device, self._train_step.pipeline
        generator = torch.Generator(device).manual_seed(0)
        return torch.randn(pipeline.shape, device=device, dtype=pipeline.dtype, generator=generator)

    def _parts_of(self, chunk: int, tokens: torch.Tensor) -> dict[Named, Part]:
        """Return the parts of ``chunk`` that the scope names.

        Args:
            tokens: int64 (microbatch size, sequence + 1).
        """
        decoder = self._train_step.chunks[chunk]
        dtype = torch.promote_types(self._train_step.pipeline.dtype, torch.float32)
        positions = decoder.positions(tokens[:, :-1], dtype)
        return {
            (name, kind): part
            for name, layer in decoder.named_layers().items()
            for kind, part in layer_parts(layer, self.scope, positions).items()
        }

    def _graphed(self, chunk: int, microbatch: int) -> Mapping[str, RunLayer]:
        """Return the replacement of each graphed layer of ``chunk`` for ``microbatch``."""
        in_flight = self._callables[chunk]
        calls: dict[str, dict[str, Callable[..., Any]]] = {}
        for (layer, kind), captured in in_flight[microbatch % len(in_flight)].items():
            calls.setdefault(layer, {})[kind] = self._replaying(f"{kind} of layer {layer}", captured)
        layers = self._train_step.chunks[chunk].named_layers()
        return {name: assemble_layer(layers[name], parts) for name, parts in calls.items()}

    def _replaying(self, name: str, captured: _Captured) -> Callable[..., Any]:
        def call(*inputs: torch.Tensor) -> Any:
            for tensor in inputs:
                check_input(f"the input of {name}", captured.sample, tensor)
            self.counter.replays += 1
            return captured.part.rebuild(captured.call(*inputs))

        return call


class TorchCallables(_LayerCallables):
    """Gives each microbatch in flight its own memory pool.

    Callables are captured one after another, but replays of different microbatches alternate. In a shared pool, one
    microbatch's replay would overwrite memory that another one's capture had freed.
    """

    mechanism = "torch.cuda.make_graphed_callables, a forward and a backward graph for each part"

    def make_callables(self, parts_of_chunk: PartsOfChunk, sample: torch.Tensor) -> Callables:
        return [
            [_capture_microbatch(parts_of_chunk(chunk), sample) for _ in range(count)]
            for chunk, count in enumerate(in_flight_by_chunk(self._train_step.pipeline.actions))
        ]


class TransformerEngineCallables(_LayerCallables):
    """Captures a whole step in the order of the schedule. Microbatches that are never in flight together share memory."""

    mechanism = "transformer_engine.pytorch.make_graphed_callables, a forward and a backward graph for each part"

    def make_callables(self, parts_of_chunk: PartsOfChunk, sample: torch.Tensor) -> Callables:
        actions = self._train_step.pipeline.actions
        in_flight = in_flight_by_chunk(actions)
        chunks = [parts_of_chunk(chunk) for chunk in range(len(in_flight))]
        # Without a pipeline a single microbatch is in flight, and one set of callables serves all.
        alone = in_flight == [1]
        count = 1 if alone else 1 + max(action.microbatch for action in actions)
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
            **self._products.callable_settings,
        )
        # Calls come in the order of samples: by chunk, then by microbatch.
        remaining = iter(calls)
        return [
            [{name: _Captured(part, next(remaining), sample) for name, part in parts.items()} for _ in range(count)]
            for parts in chunks
        ]


def _capture_microbatch(parts: dict[Named, Part], sample: torch.Tensor) -> dict[Named, _Captured]:
    """Capture ``parts`` into one memory pool."""
    samples = tuple(_inputs(part, sample) for part in parts.values())
    if not parts:
        return {}
    calls = torch.cuda.make_graphed_callables(tuple(parts.values()), samples, num_warmup_iters=WARMUP_PASSES)
    return {name: _Captured(part, call, sample) for (name, part), call in zip(parts.items(), calls, strict=True)}


def _inputs(part: Part, sample: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a copy of ``sample`` for each input of ``part``, because captures must not share static buffers."""
    return tuple(sample.clone().requires_grad_() for _ in range(part.inputs))


def _make_graphed_callables() -> Callable[..., Any]:
    setting, fix = "cuda_graph.impl='transformer_engine'", "install it, or set cuda_graph.impl=torch"
    module = import_package("transformer_engine.pytorch", "transformer-engine", setting, fix)
    return cast(Callable[..., Any], module.make_graphed_callables)
