"""The decoder: embedding, layers of attention and feed-forward, head, and the loss."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launch.engines.torch_native.attention import Attention
from launch.engines.torch_native.checkpoint import load_weights
from launch.engines.torch_native.core_attention import Positions, block_masks
from launch.engines.torch_native.elementwise import Elementwise, compiled
from launch.engines.torch_native.mlp import Mlp
from launch.engines.torch_native.moe import MixtureOfExperts, Routed
from launch.engines.torch_native.rotary import rotary_tables
from launch.engines.torch_native.router import Router
from launch.engines.torch_native.weights import draw_weights
from launch.spec import Model, Training


class Losses(NamedTuple):
    """Of one micro-batch; scalars are of at least float32.

    ``objective`` is what is differentiated: the cross-entropy plus the router's losses. ``cross_entropy``, the mean
    over the micro-batch's tokens in nats, is what is reported. ``choices``, int64 of shape (layers with experts,
    experts), says how many tokens chose each expert; None in a dense model.
    """

    objective: torch.Tensor
    cross_entropy: torch.Tensor
    choices: Optional[torch.Tensor]


class Layer(nn.Module):
    def __init__(self, model: Model, number: int, training: Training, elementwise: Elementwise, packed: bool) -> None:
        super().__init__()
        # Megatron-Core: with a frequency of n every n-th layer from the first on is a mixture of experts.
        mixture = model.is_moe and number % model.moe_layer_freq == 0
        self.epsilon = model.norm_epsilon
        self.elementwise = elementwise
        self.attention_norm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.attention = Attention(model, number, training, elementwise, packed)
        self.mlp_norm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.mlp = MixtureOfExperts(model, elementwise) if mixture else Mlp(model, model.ffn_hidden_size, elementwise)

    def forward(self, x: torch.Tensor, positions: Positions) -> tuple[torch.Tensor, Optional[Routed]]:
        """(batch, sequence, hidden) -> the same, and what the experts' router says, None of a dense layer."""
        normed = self.elementwise.rms_norm(x, self.attention_norm.weight, self.epsilon)
        change = self.attention(normed, positions)
        x, normed = self.elementwise.add_and_norm(x, change, self.mlp_norm.weight, self.epsilon)
        if isinstance(self.mlp, MixtureOfExperts):
            change, routed = self.mlp(normed)
            return x + change, routed
        return x + self.mlp(normed), None


class Decoder(nn.Module):
    """``eod_token`` ends a document, where documents are packed: the token after it is at position 0 and sees none
    before it. None: a sequence is one document."""

    def __init__(self, model: Model, training: Training | None = None, eod_token: Optional[int] = None) -> None:
        super().__init__()
        training = training or Training()
        elementwise = compiled() if training.compile == "elementwise" else Elementwise()
        self.model = model
        self.eod_token = eod_token
        self.elementwise = elementwise
        self.recompute = training.recompute == "full"
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        layers = [
            Layer(model, number, training, elementwise, eod_token is not None) for number in range(model.num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.cores = [layer.attention.core for layer in layers]
        self.final_norm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        if model.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Losses:
        """Predict each token from those before it.

        Args:
            tokens: int64 of shape (batch, sequence + 1).
        """
        x, routed = self._decode(tokens[:, :-1])
        cross_entropy = self.elementwise.cross_entropy(self.head(x), tokens[:, 1:])
        objective = cross_entropy
        for one in routed:
            objective = objective + one.loss
        choices = torch.stack([one.choices for one in routed]) if routed else None
        return Losses(objective, cross_entropy, choices)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 of shape (batch, sequence) -> (batch, sequence, vocabulary)"""
        logits: torch.Tensor = self.head(self._decode(tokens)[0])
        return logits

    def routers(self) -> list[Router]:
        """In order of the layers that have one."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def attention_backends(self) -> dict[str, str]:
        """By kind of layer ("full layers", "layers of window 128"), the backend of its attention."""
        device = self.head.weight.device
        return {
            f"layers of window {core.window}" if core.window else "full layers": core.backend(device)
            for core in self.cores
        }

    def _decode(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[Routed]]:
        x = self.embedding(tokens)
        positions = self._positions(tokens, torch.promote_types(x.dtype, torch.float32))
        routings = []
        for layer in self.layers:
            if self.recompute:
                x, routed = checkpoint(layer, x, positions, use_reentrant=False, preserve_rng_state=False)
            else:
                x, routed = layer(x, positions)
            if routed is not None:
                routings.append(routed)
        return self.elementwise.rms_norm(x, self.final_norm.weight, self.model.norm_epsilon), routings

    def _positions(self, tokens: torch.Tensor, dtype: torch.dtype) -> Positions:
        place = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        documents = None
        if self.eod_token is not None:
            first = torch.nn.functional.pad(tokens[:, :-1] == self.eod_token, (1, 0))
            documents = first.cumsum(1)
            place = place - torch.where(first, place, 0).cummax(1).values
        windows = {core.window for core in self.cores if core.backend(tokens.device) == "flex"}
        masks = block_masks(windows, tokens.shape[1], documents, tokens.device)
        return Positions(rotary_tables(self.model, place, dtype), documents, masks)


def build_decoder(
    model: Model,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    training: Training | None = None,
    eod_token: Optional[int] = None,
) -> Decoder:
    """A decoder on ``device`` with its first weights. ``dtype`` is that of weights and activations.

    Raises:
        launch.errors.CheckpointError: ``model.weights`` names a checkpoint that does not fit.
    """
    with torch.device("meta"):  # no memory and no random numbers spent on weights that are drawn over
        decoder = Decoder(model, training, eod_token)
    # Ties survive neither to_empty nor to(dtype) on the meta device in every version; they are made again.
    decoder = decoder.to(dtype).to_empty(device=device)
    if model.tie_embeddings:
        decoder.head.weight = decoder.embedding.weight
    for router in decoder.routers():
        router.reset_expert_bias()
    if model.weights == "random":
        draw_weights(decoder, model, seed)
    else:
        load_weights(decoder, model)
    return decoder
