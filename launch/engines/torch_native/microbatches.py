"""The microbatches of one step on one rank: forward and backward passes through its chunks, in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from launch.engines.torch_native.decoder import Decoder, Losses, ObserveOutput, RunLayer, stack_tokens_per_expert
from launch.engines.torch_native.optim.flat_parameters import FlatParameters


class _Forwarded(NamedTuple):
    """What a backward pass needs of its forward pass."""

    outputs: list[torch.Tensor]
    """The gradient of the first may come from the next stage."""
    activation: torch.Tensor | None
    """The input, if the previous stage waits for its gradient."""
    from_graphs: bool


@dataclass(eq=False)
class Microbatches:
    """Runs microbatches, and accumulates their losses and gradients.

    Attributes:
        batch: int64 (microbatches, microbatch size, sequence + 1).
        model: runs a chunk that is the whole model.
        graphed: (chunk, microbatch) -> what runs in place of a layer, by the layer's name.
        observer: microbatch -> the function that observes outputs of layers.
        loss: shape (): the mean cross-entropy over all microbatches on the rank with the head, zero on others. Without the
            routers' losses, which are differentiated too.
        tokens_per_expert: by chunk, int64 (layers with experts, experts) for this rank's tokens.
    """

    batch: torch.Tensor
    chunks: Sequence[Decoder]
    model: Callable[[torch.Tensor, ObserveOutput], Losses]
    graphed: Callable[[int, int], Mapping[str, RunLayer]]
    main: FlatParameters
    observer: Callable[[int], ObserveOutput]
    loss: torch.Tensor = field(init=False)
    tokens_per_expert: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    _forwarded: dict[tuple[int, int], _Forwarded] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.loss = torch.zeros((), device=self.batch.device, dtype=self.main.weights.dtype)

    def forward(self, chunk: int, number: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        """Run microbatch ``number`` forward through ``chunk``. Return the activation for the next stage, None at the last.

        Args:
            activation: (microbatch size, sequence or this rank's shard, hidden_size); None at the first stage.
        """
        decoder, tokens, observe = self.chunks[chunk], self.batch[number], self.observer(number)
        if activation is not None:
            activation.requires_grad_()
        sent = None
        graphed = self.graphed(chunk, number)
        if decoder.is_first and decoder.is_last and not graphed:
            losses = self.model(tokens, observe)
        else:
            x, routed = decoder.decode(tokens, activation, graphed, observe)
            if not decoder.is_last:
                outputs = [x, *(one.loss for one in routed if one.loss.requires_grad)]
                self._count(chunk, stack_tokens_per_expert(routed))
                sent = x.detach()
            else:
                losses = decoder.losses(x, routed, tokens, observe)
        if decoder.is_last:
            self.loss.add_(losses.cross_entropy.detach(), alpha=1 / len(self.batch))
            self._count(chunk, losses.tokens_per_expert)
            outputs = [losses.objective]
        self._forwarded[chunk, number] = _Forwarded(outputs, activation, bool(graphed))
        return sent

    def backward(self, chunk: int, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run microbatch ``number`` backward, and add to the main gradients. Return the gradient of the input activation.

        Args:
            gradient: of the chunk's output activation; None at the last stage.
        """
        outputs, activation, from_graphs = self._forwarded.pop((chunk, number))
        parameters = list(self.chunks[chunk].parameters())
        inputs = parameters if activation is None else [*parameters, activation]
        output_gradients = [gradient, *([None] * (len(outputs) - 1))]
        first, last = number == 0, number == len(self.batch) - 1
        with self.main.accumulate_gradients(1 / len(self.batch), first, last):
            input_gradients = torch.autograd.grad(outputs, inputs, output_gradients)
        if activation is None:
            return None
        # Copy graph memory: the next replay overwrites it while the previous stage may still receive it. Activations need no
        # copy, since their callables run again only after the backward pass, which follows their receipt.
        return input_gradients[-1].clone() if from_graphs else input_gradients[-1]

    def _count(self, chunk: int, tokens_per_expert: torch.Tensor | None) -> None:
        if tokens_per_expert is not None:
            so_far = self.tokens_per_expert.get(chunk)
            # Copy, since the next replay of a graph overwrites its outputs.
            self.tokens_per_expert[chunk] = tokens_per_expert.clone() if so_far is None else so_far + tokens_per_expert
