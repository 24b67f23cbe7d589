"""Causal self-attention with grouped queries, rotary positions and, where the model has it, normed queries and keys."""

from __future__ import annotations

import torch
from torch import nn

from launch.spec import Model

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, each of shape (sequence, 1, kv_channels / 2)."""


def rotary_tables(model: Model, length: int, device: torch.device, dtype: torch.dtype) -> Rotary:
    """Angles of RoPE (Su et al., 2021, arXiv:2104.09864): position p turns pair i by p * base^(-2i / kv_channels).

    They are computed in float64: at position 100,000 float32 is off by 0.008 radians.
    """
    pairs = torch.arange(0, model.kv_channels, 2, device=device, dtype=torch.float64)
    positions = torch.arange(length, device=device, dtype=torch.float64)
    angles = torch.outer(positions, model.rotary_base ** (-pairs / model.kv_channels)).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Turn the pairs (i, i + kv_channels / 2) of ``x``, of shape (batch, sequence, heads, kv_channels)."""
    cos, sin = rotary
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """``num_attention_heads`` queries share ``num_query_groups`` keys and values."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = (model.num_attention_heads, model.num_query_groups, model.num_query_groups)
        self.channels = model.kv_channels
        self.qkv = nn.Linear(model.hidden_size, sum(self.heads) * self.channels, bias=False)
        self.output = nn.Linear(self.heads[0] * self.channels, model.hidden_size, bias=False)
        self.query_norm = _head_norm(model)
        self.key_norm = _head_norm(model)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """(batch, sequence, hidden) -> the same."""
        qkv = self.qkv(x).unflatten(-1, (sum(self.heads), self.channels))
        query, key, value = qkv.split(self.heads, dim=-2)
        query = rotate(self.query_norm(query), rotary)
        key = rotate(self.key_norm(key), rotary)
        mixed = nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.heads[0] != self.heads[1],
        )
        projected: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return projected


def _head_norm(model: Model) -> nn.Module:
    return nn.RMSNorm(model.kv_channels, model.norm_epsilon) if model.qk_layernorm else nn.Identity()
