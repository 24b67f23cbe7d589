"""Causal self-attention with grouped queries, rotary embeddings, and optional biases, norms, windows and sinks."""

from __future__ import annotations

import torch
from torch import nn

from launch.engines.torch_native.layers.attention_backends import CoreAttention, Positions
from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.layers.norm import Norm
from launch.engines.torch_native.layers.recomputation import recompute_if
from launch.engines.torch_native.parallel.sharding import Sharding


class Attention(nn.Module):
    """Self-attention in which ``num_attention_heads`` query heads share ``num_query_groups`` heads of keys and values."""

    def __init__(self, context: BuildContext, number: int) -> None:
        super().__init__()
        model, products, tp = context.model, context.products, context.tp
        heads = (model.num_attention_heads, model.num_query_groups, model.num_query_groups)
        self.heads = tuple(count // tp.size for count in heads)
        self.channels = model.kv_channels
        self.epsilon = model.norm_epsilon
        self.elementwise = context.elementwise
        widths = tuple(count * self.channels for count in heads)
        qkv_bias = model.add_qkv_bias or model.add_bias_linear
        self.qkv = products.column_parallel(model.hidden_size, widths, qkv_bias, tp)
        self.recomputes_core = "core_attn" in context.training.recomputed
        self.draws = model.attention_dropout > 0
        self.core = CoreAttention(model, number, context.training.attention_backend, context.packed, tp.size)
        self.output = products.row_parallel(widths[0], model.hidden_size, model.add_bias_linear, tp)
        self.query_norm = Norm(model.kv_channels, tp.inside_sharding) if model.qk_layernorm else None
        self.key_norm = Norm(model.kv_channels, tp.inside_sharding) if model.qk_layernorm else None
        self.sinks = nn.Parameter(torch.empty(self.heads[0])) if model.attention_sinks else None
        self.shardings = {"sinks": Sharding("tp", 0)} if model.attention_sinks else {}

    def forward(self, x: torch.Tensor, positions: Positions) -> torch.Tensor:
        """(batch, sequence or this rank's shard, hidden_size) -> the same."""
        qkv = self.qkv(x).unflatten(-1, (sum(self.heads), self.channels))
        query, key, value = qkv.split(self.heads, dim=-2)
        norm_and_rotate = self.elementwise.norm_and_rotate
        query = norm_and_rotate(query, getattr(self.query_norm, "weight", None), self.epsilon, positions.rotary)
        key = norm_and_rotate(key, getattr(self.key_norm, "weight", None), self.epsilon, positions.rotary)
        mixed = recompute_if(self.recomputes_core, self.core, self.draws)(query, key, value, self.sinks, positions)
        projected: torch.Tensor = self.output(mixed.flatten(-2))
        return projected
