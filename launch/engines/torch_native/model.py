"""The decoder: embedding, layers of attention and feed-forward, head, and the loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from launch.engines.torch_native.attention import Attention, Rotary, rotary_tables
from launch.engines.torch_native.moe import MixtureOfExperts
from launch.engines.torch_native.weights import draw_weights
from launch.spec import Model


class Losses(NamedTuple):
    """Scalars of one micro-batch, at least float32.

    ``objective`` is what is differentiated: the cross-entropy plus the router's losses. ``cross_entropy``, the mean
    over the micro-batch's tokens in nats, is what is reported.
    """

    objective: torch.Tensor
    cross_entropy: torch.Tensor


class Mlp(nn.Module):
    """SwiGLU (Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate_up = nn.Linear(model.hidden_size, 2 * model.ffn_hidden_size, bias=False)
        self.down = nn.Linear(model.ffn_hidden_size, model.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, sequence, hidden) -> the same, and no router's loss: a scalar zero."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up), x.new_zeros((), dtype=torch.float32)


class Layer(nn.Module):
    def __init__(self, model: Model, number: int) -> None:
        super().__init__()
        # Megatron-Core: with a frequency of n every n-th layer from the first on is a mixture of experts.
        mixture = model.is_moe and number % model.moe_layer_freq == 0
        self.attention_norm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.attention = Attention(model)
        self.mlp_norm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.mlp = MixtureOfExperts(model) if mixture else Mlp(model)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, sequence, hidden) -> the same, and the layer's router loss as a scalar."""
        x = x + self.attention(self.attention_norm(x), rotary)
        change, router_loss = self.mlp(self.mlp_norm(x))
        return x + change, router_loss


class Decoder(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model, number) for number in range(model.num_layers))
        self.final_norm = nn.RMSNorm(model.hidden_size, model.norm_epsilon)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        if model.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Losses:
        """Predict each token from those before it.

        Args:
            tokens: int64 of shape (batch, sequence + 1).
        """
        x = self.embedding(tokens[:, :-1])
        dtype = torch.promote_types(x.dtype, torch.float32)
        rotary = rotary_tables(self.model, x.shape[1], x.device, dtype)
        router_loss = x.new_zeros((), dtype=dtype)
        for layer in self.layers:
            x, loss = layer(x, rotary)
            router_loss = router_loss + loss
        logits = self.head(self.final_norm(x)).to(dtype)
        cross_entropy = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return Losses(cross_entropy + router_loss, cross_entropy)


def build_decoder(model: Model, seed: int, dtype: torch.dtype, device: torch.device) -> Decoder:
    """A decoder on ``device`` with its first weights. ``dtype`` is that of weights and activations."""
    with torch.device("meta"):  # no memory and no random numbers spent on weights that are drawn over
        decoder = Decoder(model)
    # Ties survive neither to_empty nor to(dtype) on the meta device in every version; they are made again.
    decoder = decoder.to(dtype).to_empty(device=device)
    if model.tie_embeddings:
        decoder.head.weight = decoder.embedding.weight
    draw_weights(decoder, model, seed)
    return decoder
