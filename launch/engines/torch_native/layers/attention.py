"""Causal self-attention with grouped queries, rotary positions and what a model adds: biases, norms, windows, sinks."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launch.engines.torch_native.layers.attention_backends import CoreAttention, Positions
from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.layers.norm import Norm
from launch.engines.torch_native.parallel.sharding import Sharding
from launch.engines.torch_native.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class Attention(nn.Module):
    """``num_attention_heads`` queries share ``num_query_groups`` keys and values."""

    def __init__(self, blueprint: BuildContext, number: int) -> None:
        super().__init__()
        model, tp = blueprint.model, blueprint.tp
        heads = (model.num_attention_heads, model.num_query_groups, model.num_query_groups)
        self.heads = tuple(count // tp.size for count in heads)
        self.channels = model.kv_channels
        self.epsilon = model.norm_epsilon
        self.elementwise = blueprint.elementwise
        self.recompute = blueprint.training.recompute == "selective"
        widths = tuple(count * self.channels for count in heads)
        self.qkv = ColumnParallelLinear(model.hidden_size, widths, model.add_qkv_bias or model.add_bias_linear, tp)
        self.core = CoreAttention(model, number, blueprint.training.attention_backend, blueprint.packed, tp.size)
        self.output = RowParallelLinear(widths[0], model.hidden_size, model.add_bias_linear, tp)
        self.query_norm = Norm(model.kv_channels, tp.within) if model.qk_layernorm else None
        self.key_norm = Norm(model.kv_channels, tp.within) if model.qk_layernorm else None
        self.sinks = nn.Parameter(torch.empty(self.heads[0])) if model.attention_sinks else None
        self.shardings = {"sinks": Sharding("tp", 0)} if model.attention_sinks else {}

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
