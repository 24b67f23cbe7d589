"""The microbatches of one step on one rank: forward and backward through its chunks, in whatever order they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from launch.engines.torch_native.decoder import Decoder, Losses, ObserveOutput, RunLayer, stack_tokens_per_expert
from launch.engines.torch_native.optim.flat_parameters import FlatParameters


class _Forwarded(NamedTuple):
    """What a backward pass begins from: outputs, of which the first's gradient may come from the next stage, and the
    activation that the previous stage waits for the gradient of. ``by_graphs`` says whether layers ran from graphs."""

    outputs: list[torch.Tensor]
    activation: torch.Tensor | None
    by_graphs: bool


class Microbatches:
    """
    Args:
        batch: int64 of shape (microbatches, microbatch size, sequence + 1).
        whole: what runs a chunk that is the whole model.
        graphed: (chunk, microbatch) -> by its name, what runs in the place of a layer.
        observer: microbatch -> what is shown what its layers give.
    """

    def __init__(
        self,
        batch: torch.Tensor,
        chunks: Sequence[Decoder],
        whole: Callable[[torch.Tensor, ObserveOutput], Losses],
        graphed: Callable[[int, int], Mapping[str, RunLayer]],
        main: FlatParameters,
        observer: Callable[[int], ObserveOutput],
    ) -> None:
        self._batch = batch
        self._chunks = chunks
        self._whole = whole
        self._graphed = graphed
        self._main = main
        self._observer = observer
        self._forwarded: dict[tuple[int, int], _Forwarded] = {}
        self.loss = torch.zeros((), device=batch.device, dtype=main.weights.dtype)
        """The mean cross-entropy over all microbatches, on the rank that holds the head; zero on others. What is
        differentiated holds the routers' losses too."""
        self.tokens_per_expert: dict[int, torch.Tensor] = {}
        """By chunk, how many of this rank's tokens chose each expert: int64 of shape (layers with experts, experts)."""

    def forward(self, chunk: int, number: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        """Microbatch ``number`` through ``chunk``; returns the activation for the next stage, None from the last."""
        decoder, tokens, observe = self._chunks[chunk], self._batch[number], self._observer(number)
        if activation is not None:
            activation.requires_grad_()
        sent = None
        graphed = self._graphed(chunk, number)
        if decoder.is_first and decoder.is_last and not graphed:
            losses = self._whole(tokens, observe)
        else:
            x, routed = decoder.decode(tokens, activation, graphed, observe)
            if not decoder.is_last:
                outputs = [x, *(one.loss for one in routed if one.loss.requires_grad)]
                self._count(chunk, stack_tokens_per_expert(routed))
                sent = x.detach()
            else:
                losses = decoder.losses(x, routed, tokens, observe)
        if decoder.is_last:
            self.loss.add_(losses.cross_entropy.detach(), alpha=1 / len(self._batch))
            self._count(chunk, losses.tokens_per_expert)
            outputs = [losses.objective]
        self._forwarded[chunk, number] = _Forwarded(outputs, activation, bool(graphed))
        return sent

    def backward(self, chunk: int, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Add to the main gradients; returns the gradient of the activation that came from the stage before."""
        outputs, activation, by_graphs = self._forwarded.pop((chunk, number))
        parameters = list(self._chunks[chunk].parameters())
        inputs = parameters if activation is None else [*parameters, activation]
        gradients = [gradient, *([None] * (len(outputs) - 1))]
        with self._main.accumulate_gradients(
            1 / len(self._batch), first=number == 0, last=number == len(self._batch) - 1
        ):
            found = torch.autograd.grad(outputs, inputs, gradients)
        if activation is None:
            return None
        # A copy of what lies in graph memory: the next replay does not wait for the stage before to take it. An activation
        # needs none, since the callables that gave it run again after its backward pass alone, for which it was taken.
        return found[-1].clone() if by_graphs else found[-1]

    def _count(self, chunk: int, tokens_per_expert: torch.Tensor | None) -> None:
        if tokens_per_expert is not None:
            so_far = self.tokens_per_expert.get(chunk)
            # A copy: what a graph has given is overwritten when it runs again.
            self.tokens_per_expert[chunk] = tokens_per_expert.clone() if so_far is None else so_far + tokens_per_expert
