"""Causal self-attention with grouped queries, rotary positions and what a model adds: biases, norms, windows, sinks."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launch.engines.torch_native.core_attention import CoreAttention, Positions
from launch.engines.torch_native.elementwise import Elementwise
from launch.spec import Model, Training


class Attention(nn.Module):
    """``num_attention_heads`` queries share ``num_query_groups`` keys and values."""

    def __init__(self, model: Model, number: int, training: Training, elementwise: Elementwise, packed: bool) -> None:
        super().__init__()
        self.heads = (model.num_attention_heads, model.num_query_groups, model.num_query_groups)
        self.channels = model.kv_channels
        self.epsilon = model.norm_epsilon
        self.elementwise = elementwise
        self.recompute = training.recompute == "selective"
        qkv_bias = model.add_qkv_bias or model.add_bias_linear
        self.qkv = nn.Linear(model.hidden_size, sum(self.heads) * self.channels, bias=qkv_bias)
        self.core = CoreAttention(model, number, training.attention_backend, packed)
        self.output = nn.Linear(self.heads[0] * self.channels, model.hidden_size, bias=model.add_bias_linear)
        self.query_norm = _head_norm(model)
        self.key_norm = _head_norm(model)
        self.sinks = nn.Parameter(torch.empty(self.heads[0])) if model.attention_sinks else None

    def forward(self, x: torch.Tensor, positions: Positions) -> torch.Tensor:
        """(batch, sequence, hidden) -> the same."""
        qkv = self.qkv(x).unflatten(-1, (sum(self.heads), self.channels))
        query, key, value = qkv.split(self.heads, dim=-2)
        turn = self.elementwise.norm_and_rotate
        query = turn(query, getattr(self.query_norm, "weight", None), self.epsilon, positions.rotary)
        key = turn(key, getattr(self.key_norm, "weight", None), self.epsilon, positions.rotary)
        inputs = (query, key, value, self.sinks, positions)
        if self.recompute:
            mixed = checkpoint(self.core, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self.core(*inputs)
        projected: torch.Tensor = self.output(mixed.flatten(-2))
        return projected


def _head_norm(model: Model) -> nn.RMSNorm | None:
    return nn.RMSNorm(model.kv_channels, model.norm_epsilon) if model.qk_layernorm else None
