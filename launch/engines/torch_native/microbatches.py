"""The microbatches of one step on one rank: forward and backward passes through its chunks, in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from launch.engines.layer_outputs import LayerOutputs
from launch.engines.torch_native.decoder import (
    Decoder,
    Losses,
    ObserveOutput,
    RunLayer,
    ignore_output,
    stack_tokens_per_expert,
)
from launch.engines.torch_native.moe.router import RepeatedChoice
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.products.products import Products


class _Forwarded(NamedTuple):
    """The results of a forward pass that its backward pass needs."""

    outputs: list[torch.Tensor]
    """The gradient of the first may come from the next stage."""
    activation: torch.Tensor | None
    """The input, if the previous stage waits for its gradient."""
    from_graphs: bool


Choices = Mapping[tuple[int, int], Sequence[RepeatedChoice]]
"""Choices by (chunk, microbatch), one for each router of the chunk."""


@dataclass(eq=False)
class Microbatches:
    """Runs microbatches, and accumulates their losses and gradients.

    Attributes:
        batch: int64 (microbatches, microbatch size, sequence + 1).
        model: runs a chunk that is the whole model.
        graphed: (chunk, microbatch) -> replacements of layers, by the layer's name.
        keep_routing, keep_layers: whether ``routing`` and ``layers`` are filled.
        repeated: choices that routers repeat instead of making their own.
        losses: (microbatches,): the mean cross-entropy of each on the rank with the head, zero on others. They exclude the
            routers' losses, which are differentiated too.
        routing: by (chunk, microbatch), for each layer with experts, int64 (T, topk): the experts of this rank's tokens.
        tokens_per_expert: by chunk, int64 (layers with experts, experts): counts of this rank's tokens.
    """

    batch: torch.Tensor
    chunks: Sequence[Decoder]
    model: Callable[[torch.Tensor, ObserveOutput], Losses]
    graphed: Callable[[int, int], Mapping[str, RunLayer]]
    main: FlatParameters
    keep_routing: bool = False
    keep_layers: bool = False
    repeated: Choices = field(default_factory=dict)
    losses: torch.Tensor = field(init=False)
    routing: dict[tuple[int, int], Sequence[torch.Tensor]] = field(init=False, default_factory=dict)
    layers: LayerOutputs = field(init=False)
    tokens_per_expert: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    _forwarded: dict[tuple[int, int], _Forwarded] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.losses = torch.zeros(len(self.batch), device=self.batch.device, dtype=self.main.precision)
        self.layers = LayerOutputs(self.chunks[0].context.model.num_layers)

    def forward(self, chunk: int, number: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        """Run microbatch ``number`` forward through ``chunk``. Return the activation for the next stage, None at the last.

        Args:
            activation: (microbatch size, sequence or this rank's shard, hidden_size); None at the first stage.
        """
        decoder, tokens = self.chunks[chunk], self.batch[number]
        observe = partial(self.layers.observe, number) if self.keep_layers else ignore_output
        if activation is not None:
            activation.requires_grad_()
        sent = None
        graphed = self.graphed(chunk, number)
        self._repeat_choices(chunk, number)
        with self.products.forward_pass(is_first_microbatch=number == 0):
            if decoder.is_first and decoder.is_last and not graphed:
                losses = self.model(tokens, observe)
            else:
                x, routed = decoder.decode(tokens, activation, graphed, observe)
                if not decoder.is_last:
                    outputs = [x, *(one.loss for one in routed if one.loss.requires_grad)]
                    self._count(chunk, stack_tokens_per_expert(routed))
                    self._keep(chunk, number, [one.experts for one in routed])
                    sent = x.detach()
                else:
                    losses = decoder.losses(x, routed, tokens)
        if decoder.is_last:
            self.losses[number].copy_(losses.cross_entropy.detach())
            self._count(chunk, losses.tokens_per_expert)
            self._keep(chunk, number, losses.experts)
            outputs = [losses.objective]
        self._forwarded[chunk, number] = _Forwarded(outputs, activation, bool(graphed))
        return sent

    def backward(self, chunk: int, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run microbatch ``number`` backward and add to the main gradients. Return the gradient of the input activation.

        Args:
            gradient: gradient of the chunk's output activation, in the shape of that activation; None at the last stage.
        """
        outputs, activation, from_graphs = self._forwarded.pop((chunk, number))
        parameters = list(self.chunks[chunk].parameters())
        inputs = parameters if activation is None else [*parameters, activation]
        output_gradients = [gradient, *([None] * (len(outputs) - 1))]
        first, last = number == 0, number == len(self.batch) - 1
        # Recomputation runs routers again.
        self._repeat_choices(chunk, number)
        with self.main.accumulate_gradients(1 / len(self.batch), first, last):
            input_gradients = torch.autograd.grad(outputs, inputs, output_gradients)
        self.products.end_backward_pass()
        if activation is None:
            return None
        # Copy graph memory, because the next replay may overwrite it before the previous stage has received it. Activations
        # need no copy: their callable replays only after this microbatch's backward pass, when the next stage has received
        # them.
        return input_gradients[-1].clone() if from_graphs else input_gradients[-1]

    @property
    def products(self) -> Products:
        return self.chunks[0].context.products

    def _repeat_choices(self, chunk: int, number: int) -> None:
        if self.repeated:
            for router, choice in zip(self.chunks[chunk].routers(), self.repeated[chunk, number], strict=True):
                router.repeated = choice

    def _keep(self, chunk: int, number: int, experts: Sequence[torch.Tensor]) -> None:
        if self.keep_routing:
            # Copy choices that the next replay of a layer's graph would overwrite. A graph of the whole step keeps its own.
            capturing = self.batch.is_cuda and torch.cuda.is_current_stream_capturing()
            self.routing[chunk, number] = experts if capturing else [one.clone() for one in experts]

    def _count(self, chunk: int, tokens_per_expert: torch.Tensor | None) -> None:
        if tokens_per_expert is not None:
            so_far = self.tokens_per_expert.get(chunk)
            # Copy, because the next replay of a graph overwrites its outputs.
            self.tokens_per_expert[chunk] = tokens_per_expert.clone() if so_far is None else so_far + tokens_per_expert
