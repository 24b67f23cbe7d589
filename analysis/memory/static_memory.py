"""What training takes of a rank's memory whatever is captured: weights, gradients and the optimizer's state.

A forecast of what has to fit at least, exact but for buckets' padding and for what a framework adds: activations,
workspaces, communicators, the context, casts to 8 bits and graph pools come on top, and are measured. Both engines hold
the same: weights in the precision of training, main gradients, and for AdamW two moments and, beside bfloat16 weights,
master weights in float32 (Megatron-Core 0.16.1, optimizer/optimizer.py, Float16OptimizerWithFloat16Params; with the
distributed optimizer a rank has moments and masters of its share alone, optimizer/distrib_optimizer.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.speed.flops import GATED_MATRICES
from launch.contract.parallel_dims import ParallelDims, layers_of
from launch.contract.spec import Model, Parallelism, RunSpec

MOMENTS = 2 * 4
"""Bytes an element: AdamW's, in float32."""
MASTER = 4
BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Parameters:
    """Elements that a rank holds; those of experts apart, of which other ranks have the copies."""

    dense: int = 0
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)


def state_bytes(spec: RunSpec) -> int:
    """Of the rank that holds most of the model."""
    return max(bytes_of_stages(spec))


def bytes_of_stages(spec: RunSpec) -> list[int]:
    """Of a rank of each pipeline stage."""
    return [_bytes(spec, held) for held in stages(spec.model, spec.parallelism)]


def stages(model: Model, layout: Parallelism) -> list[Parameters]:
    """What a rank of each pipeline stage holds."""
    virtual = layers_of(model.num_layers, layout.pp, layout.vpp)
    held = [
        sum((_layer(model, layout, number) for part in virtual[stage :: layout.pp] for number in part), Parameters())
        for stage in range(layout.pp)
    ]
    embedding = model.vocab_size * model.hidden_size // layout.tp
    shared = model.tie_embeddings and layout.pp == 1
    held[0] += Parameters(embedding)
    held[-1] += Parameters(model.hidden_size + (0 if shared else embedding))
    return held


def _bytes(spec: RunSpec, held: Parameters) -> int:
    training, layout = spec.training, spec.parallelism
    weight = BYTES[training.precision]
    gradient = max(weight, BYTES[training.gradient_precision])
    own = MOMENTS + (MASTER if training.precision == "bf16" else 0)
    dims = ParallelDims.of(layout)
    shares = (dims.cp * dims.dp, dims.expert_dp) if layout.distributed_optimizer else (1, 1)
    return sum(
        elements * (weight + gradient) + elements * own // share
        for elements, share in zip((held.dense, held.experts), shares, strict=True)
    )


def _layer(model: Model, layout: Parallelism, number: int) -> Parameters:
    """Both norms, attention and the feed-forward."""
    attention = Parameters(2 * model.hidden_size + _attention(model, layout.tp))
    if not model.has_experts(number):
        return attention + Parameters(_gated(model, model.ffn_hidden_size, layout.tp))
    shared = model.moe_shared_expert_ffn_hidden_size
    router = model.num_moe_experts * (model.hidden_size + model.add_bias_linear)
    expert = _gated(model, model.moe_ffn_hidden_size, layout.etp)
    return attention + Parameters(
        router + (_gated(model, shared, layout.tp) if shared else 0), model.num_moe_experts // layout.ep * expert
    )


def _attention(model: Model, tp: int) -> int:
    """Norms of queries and keys, and the bias of the output, are held whole by all tensor-parallel ranks."""
    queries = model.num_attention_heads * model.kv_channels
    columns = queries + 2 * model.num_query_groups * model.kv_channels
    split = model.hidden_size * (columns + queries)
    split += columns if model.add_qkv_bias or model.add_bias_linear else 0
    split += model.num_attention_heads if model.attention_sinks else 0
    whole = (model.hidden_size if model.add_bias_linear else 0) + (2 * model.kv_channels if model.qk_layernorm else 0)
    return split // tp + whole


def _gated(model: Model, width: int, ranks: int) -> int:
    """The bias of the last matrix is held whole."""
    split = GATED_MATRICES * model.hidden_size * width + (2 * width if model.add_bias_linear else 0)
    return split // ranks + (model.hidden_size if model.add_bias_linear else 0)
