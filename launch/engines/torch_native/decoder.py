"""The decoder: embedding, layers of attention and MLP or experts, head, and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast

import torch
from torch import nn

from launch.engines.profile_ranges import RANGES
from launch.engines.torch_native.init.initial_weights import draw_weights
from launch.engines.torch_native.init.load_checkpoint import load_weights
from launch.engines.torch_native.layers.attention import Attention
from launch.engines.torch_native.layers.attention_backends import Positions, block_masks
from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.layers.mlp import Mlp
from launch.engines.torch_native.layers.norm import Norm
from launch.engines.torch_native.layers.recomputation import dropping, recompute_if
from launch.engines.torch_native.layers.rotary import rotary_tables
from launch.engines.torch_native.moe.layer import MixtureOfExperts, RoutingStats
from launch.engines.torch_native.moe.router import Router
from launch.engines.torch_native.parallel.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)


class Losses(NamedTuple):
    """Losses of one microbatch, in at least float32."""

    objective: torch.Tensor
    """Shape (): the cross-entropy plus the router's losses. It is differentiated."""
    cross_entropy: torch.Tensor
    """Shape (): the mean over the microbatch's tokens, in nats. It is reported."""
    tokens_per_expert: torch.Tensor | None
    """int64 (layers with experts, experts): how many tokens chose each expert; None in a dense model."""
    experts: tuple[torch.Tensor, ...]
    """For each layer with experts, int64 (T, topk): the experts of this rank's tokens, as in RoutingStats."""


class Layer(nn.Module):
    def __init__(self, context: BuildContext, number: int) -> None:
        super().__init__()
        model, norm_sharding = context.model, context.tp.outside_sharding
        self.epsilon = model.norm_epsilon
        self.elementwise = context.elementwise
        self.dropout = model.hidden_dropout
        self.recomputed = context.training.recomputed
        self.attention_norm = Norm(model.hidden_size, norm_sharding)
        self.attention = Attention(context, number)
        self.mlp_norm = Norm(model.hidden_size, norm_sharding)
        self.mlp = (
            MixtureOfExperts(context)
            if "experts" in model.parts_of_layer(number)
            else Mlp(context, model.ffn_hidden_size)
        )

    @property
    def has_experts(self) -> bool:
        return isinstance(self.mlp, MixtureOfExperts)

    def forward(self, x: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, RoutingStats | None]:
        """(batch, sequence or this rank's shard, hidden_size) -> the same, and the routing, None in a dense layer."""
        return self.forward_mlp(*self.forward_attention(x, positions))

    def forward_attention(self, x: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        """Run attention on ``x``, (batch, sequence or this rank's shard, hidden_size).

        Return the residual stream and its norm before the MLP, both in the shape of ``x``.
        """
        normed = self.elementwise.rms_norm(x, self.attention_norm.weight, self.epsilon)
        with self._without(normed, x, self.attention_norm):
            change = drop(self.attention(normed, positions), self.dropout)
        if "layernorm" in self.recomputed:
            # Compute the norm as recomputation does. Compiled together with the sum, it would round differently.
            x = x + change
            return x, self.elementwise.rms_norm(x, self.mlp_norm.weight, self.epsilon)
        return self.elementwise.add_and_norm(x, change, self.mlp_norm.weight, self.epsilon)

    def forward_mlp(self, x: torch.Tensor, normed: torch.Tensor) -> tuple[torch.Tensor, RoutingStats | None]:
        """Run the MLP or the experts on both results of :meth:`forward_attention`. Return the sum, and the routing.

        All three tensors are (batch, sequence or this rank's shard, hidden_size).
        """
        with self._without(normed, x, self.mlp_norm):
            if isinstance(self.mlp, MixtureOfExperts):
                change, routed = recompute_if("moe" in self.recomputed, self.mlp)(normed)
                return self.add(x, change), routed
            return self.add(x, recompute_if("mlp" in self.recomputed, self.mlp)(normed)), None

    def add(self, x: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        """Add what the MLP or the experts computed to the residual stream, both in the shape of ``x``."""
        return x + drop(change, self.dropout)

    def _without(self, normed: torch.Tensor, x: torch.Tensor, norm: Norm) -> AbstractContextManager[None]:
        """Return a context. If layernorm is recomputed, its backward pass computes ``normed``, the norm of ``x``, again."""
        if "layernorm" not in self.recomputed:
            return nullcontext()
        return dropping(normed, lambda x, weight: self.elementwise.rms_norm(x, weight, self.epsilon), x, norm.weight)


def drop(x: torch.Tensor, probability: float) -> torch.Tensor:
    """Zero elements of ``x`` (...) with ``probability``, and scale the others to keep the mean.

    The numbers come from the device's default generator, which every capture registers.
    """
    return nn.functional.dropout(x, probability) if probability else x


RunLayer = Callable[[torch.Tensor, Positions], tuple[torch.Tensor, RoutingStats | None]]
"""A layer, or a replacement that runs parts of it from graphs."""
ObserveOutput = Callable[[int, torch.Tensor], None]
"""A function of (position, output), called with each layer's output (launch.contract.records.step_check.LayerResult)."""


def ignore_output(position: int, output: torch.Tensor) -> None:
    """Do nothing."""


class Decoder(nn.Module):
    """Consecutive layers of the model (by default all), with the embedding before the first and the head after the last.

    Layers keep their numbers, and therefore their names, from the whole model.
    """

    def __init__(self, context: BuildContext, numbers: range | None = None) -> None:
        super().__init__()
        model = context.model
        numbers = range(model.num_layers) if numbers is None else numbers
        self.context = context
        self.is_first, self.is_last = numbers.start == 0, numbers.stop == model.num_layers
        layers = {str(number): Layer(context, number) for number in numbers}
        self.layers = nn.ModuleDict(layers)
        self.cores = [layer.attention.core for layer in layers.values()]
        if self.is_first:
            self.embedding = VocabParallelEmbedding(model.vocab_size, model.hidden_size, context.tp)
        if self.is_last:
            self.final_norm = Norm(model.hidden_size, context.tp.outside_sharding)
            self.head = ColumnParallelLinear(model.hidden_size, (model.vocab_size,), False, context.tp)
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter if the model ties them and this rank has both."""
        if self.context.model.tie_embeddings and self.is_first and self.is_last:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, observe: ObserveOutput = ignore_output) -> Losses:
        """Predict each token from those before it.

        Args:
            tokens: int64 (batch, sequence + 1).
        """
        x, routed = self.decode(tokens, observe=observe)
        return self.losses(x, routed, tokens)

    def losses(self, x: torch.Tensor, routed: list[RoutingStats], tokens: torch.Tensor) -> Losses:
        """Compute the losses from the result of :meth:`decode` on the last stage.

        Args:
            x: (batch, sequence or this rank's shard, hidden_size).
            tokens: int64 (batch, sequence + 1).
        """
        logits = self.head(x)
        if self.context.tp.size == 1:
            cross_entropy = self.context.elementwise.cross_entropy(logits, tokens[:, 1:])
        else:
            cross_entropy = vocab_parallel_cross_entropy(logits, tokens[:, 1:], self.context.tp.group)
        objective = sum((one.loss for one in routed), cross_entropy)
        experts = tuple(one.experts for one in routed)
        return Losses(objective, cross_entropy, stack_tokens_per_expert(routed), experts)

    def named_layers(self) -> dict[str, Layer]:
        """Return the layers by their numbers, as text."""
        return {name: cast(Layer, layer) for name, layer in self.layers.items()}

    def routers(self) -> list[Router]:
        """Return the routers in order of their layers."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def attention_backends(self, device: torch.device) -> dict[str, str]:
        """Return the attention backend for each kind of layer ("full layers", "layers of window 128")."""
        return {
            f"layers of window {core.window}" if core.window else "full layers": core.backend(device)
            for core in self.cores
        }

    def decode(
        self,
        tokens: torch.Tensor,
        x: torch.Tensor | None = None,
        graphed: Mapping[str, RunLayer] = {},
        observe: ObserveOutput = ignore_output,
    ) -> tuple[torch.Tensor, list[RoutingStats]]:
        """Run these layers, and the final norm after the last. Return activations in the shape of ``x``, and the routings.

        Args:
            tokens: int64 (batch, sequence + 1). The last token is not an input.
            x: output of the previous layers, (batch, sequence or this rank's shard, hidden_size); None at the first.
            graphed: replacements of layers, by the layer's name.
        """
        inputs = tokens[:, :-1]
        if x is None:
            x = drop(self.embedding(inputs), self.context.model.hidden_dropout)
            observe(0, x)
        positions = self.positions(inputs, torch.promote_types(x.dtype, torch.float32))
        routings = []
        for name, layer in self.named_layers().items():
            run: RunLayer = graphed.get(name, layer)
            with RANGES.named(f"layer {name}"):
                x, routed = recompute_if(self.context.training.recompute == "full", run, self.context.model.draws)(
                    x, positions
                )
            observe(int(name) + 1, x)
            if routed is not None:
                routings.append(routed)
        if self.is_last:
            x = self.context.elementwise.rms_norm(x, self.final_norm.weight, self.context.model.norm_epsilon)
            observe(self.context.model.num_layers + 1, x)
        return x, routings

    def positions(self, tokens: torch.Tensor, dtype: torch.dtype) -> Positions:
        """Return rotary tables in ``dtype`` and masks for tokens, int64 (batch, sequence)."""
        position = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        documents = None
        if self.context.eod_token is not None:
            first = torch.nn.functional.pad(tokens[:, :-1] == self.context.eod_token, (1, 0))
            documents = first.cumsum(1)
            # Positions restart at the first token of each document.
            position = position - torch.where(first, position, 0).cummax(1).values
        windows = {core.window for core in self.cores if core.backend(tokens.device) == "flex"}
        masks = block_masks(windows, tokens.shape[1], documents, tokens.device)
        return Positions(rotary_tables(self.context.model, position, dtype), documents, masks)


def stack_tokens_per_expert(routed: list[RoutingStats]) -> torch.Tensor | None:
    """Return int64 (layers with experts, experts), or None if there are none."""
    return torch.stack([one.tokens_per_expert for one in routed]) if routed else None


def build_decoder(
    context: BuildContext, seed: int, dtype: torch.dtype, device: torch.device, numbers: range | None = None
) -> Decoder:
    """Build a decoder on ``device`` with its initial weights. ``dtype`` is that of weights and activations.

    Raises:
        launch.contract.errors.CheckpointError: ``model.weights`` names a checkpoint that does not fit.
    """
    # On the meta device, weights that are overwritten below take no memory and draw no random numbers.
    with torch.device("meta"):
        decoder = Decoder(context, numbers)
    _allocate(decoder, dtype, device)
    decoder.tie()
    for router in decoder.routers():
        router.reset_expert_bias()
    if context.model.weights == "random":
        draw_weights(decoder, context, seed)
    else:
        load_weights(decoder, context)
    return decoder


def _allocate(decoder: Decoder, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate memory for each parameter of a decoder that is on the meta device. Tied parameters become separate.

    ``to_empty`` is not used, because its ``empty_like`` of a meta tensor loads sympy, a third of a rank's start-up time.
    """
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)))
