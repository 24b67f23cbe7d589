"""The memory of a rank's weights, gradients and optimizer state, which does not depend on what is captured.

This is a lower bound of what must fit, exact except for the padding of buckets. forecast.py adds what steps and graphs need. Both
engines hold the same: weights in training precision, main gradients, AdamW's two moments and, with bf16 weights, fp32 master weights
(Megatron-Core 0.16.1, optimizer/optimizer.py, Float16OptimizerWithFloat16Params). With the distributed optimizer a rank has only
its share of moments and master weights (optimizer/distrib_optimizer.py). A lean optimizer has LEAN bytes instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from launch.contract.mamba_sizes import CONVOLUTION, convolved_width, heads, inner_width, projected_width
from launch.contract.model_flops import GATED_MATRICES, mlp_width
from launch.contract.pipeline_stages import layers_of_stages
from launch.contract.spec import LayerPart, Model, Parallelism, RunSpec, Training

MOMENTS = 2 * 4
"""Bytes per element of AdamW's fp32 moments."""
MASTER = 4
LEAN = 2 + 2 * 2
"""Bytes per element of a lean optimizer: the low halves of master weights, and two bf16 moments."""
BYTES = {"fp32": 4, "bf16": 2}

Part = Literal["attention", "mlp", "router", "experts", "mamba"]
"""The parts of a layer that graphs capture. A shared expert counts as an mlp in a layer with experts."""


@dataclass(frozen=True)
class Parameters:
    """The numbers of parameters on a rank. Expert parameters are separate, because other ranks hold their replicas."""

    dense: int = 0
    experts: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.experts + other.experts)


def state_bytes(spec: RunSpec) -> int:
    """Return the bytes of the rank with the largest part of the model, or 0 if the model is unknown."""
    if spec.engine == "command":
        return 0
    return max(bytes_of_stages(spec))


def bytes_of_stages(spec: RunSpec) -> list[int]:
    """Return the bytes of a rank, by pipeline stage."""
    return [sum(vars(state).values()) for state in state_of_stages(spec)]


@dataclass(frozen=True)
class State:
    """Bytes of a rank."""

    weights: int
    gradients: int
    optimizer: int


def state_of_stages(spec: RunSpec) -> list[State]:
    """Return what a rank holds between steps, by pipeline stage."""
    return [_state(spec, held) for held in stages(spec.model, spec.parallelism)]


@lru_cache(maxsize=256)
def stages(model: Model, layout: Parallelism) -> list[Parameters]:
    """Return the parameters of a rank, by pipeline stage."""
    held = [
        sum((_layer(model, layout, number) for number in numbers), Parameters())
        for numbers in layers_of_stages(model.num_layers, layout.pp, layout.vpp)
    ]
    embedding = model.vocab_size * model.hidden_size // layout.tp
    shared = model.tie_embeddings and layout.pp == 1
    held[0] += Parameters(embedding)
    held[-1] += Parameters(model.hidden_size + (0 if shared else embedding))
    return held


def updated_parameters(spec: RunSpec) -> list[float]:
    """Return the number of parameters that a rank's optimizer updates, by pipeline stage."""
    shares = _optimizer_shares(spec.parallelism)
    return [held.dense / shares[0] + held.experts / shares[1] for held in stages(spec.model, spec.parallelism)]


def _optimizer_shares(layout: Parallelism) -> tuple[int, int]:
    """Return over how many ranks the optimizer divides dense parameters and those of experts."""
    return (layout.cp * layout.dp, layout.expert_dp) if layout.distributed_optimizer else (1, 1)


def gradient_bytes(training: Training) -> int:
    """Return the bytes of an element of the main gradients."""
    return max(BYTES[training.precision], BYTES[training.gradient_precision])


def _state(spec: RunSpec, held: Parameters) -> State:
    training, shares = spec.training, _optimizer_shares(spec.parallelism)
    elements, weight = held.dense + held.experts, BYTES[training.precision]
    own = MOMENTS + (MASTER if training.precision == "bf16" else 0)
    own = LEAN if training.optimizer_precision == "lean" else own
    optimizer = held.dense * own // shares[0] + held.experts * own // shares[1]
    return State(elements * weight, elements * gradient_bytes(training), optimizer)


def _layer(model: Model, layout: Parallelism, number: int) -> Parameters:
    return sum(layer_parameters(model, layout, model.parts_of_layer(number)).values(), Parameters())


@lru_cache(maxsize=256)
def layer_parameters(model: Model, layout: Parallelism, parts: tuple[LayerPart, ...]) -> dict[Part, Parameters]:
    """Return the parameters of a layer with ``parts``: all of its norms with its first part, and the feed-forward."""
    held: dict[Part, Parameters] = {}
    norms = len(parts) * model.hidden_size
    if "attention" in parts:
        held["attention"] = Parameters(norms + _attention(model, layout.tp))
    if "mamba" in parts:
        held["mamba"] = Parameters(norms + _mamba(model))
    if width := mlp_width(model, parts):
        own = 0 if "attention" in parts else norms
        held["mlp"] = Parameters(own + _gated(model, width, layout.tp))
    if "experts" in parts:
        expert = _gated(model, model.moe_ffn_hidden_size, layout.etp)
        held["router"] = Parameters(model.num_moe_experts * (model.hidden_size + model.add_bias_linear))
        held["experts"] = Parameters(experts=model.num_moe_experts // layout.ep * expert)
    return held


def _attention(model: Model, tp: int) -> int:
    """Return the number of attention's parameters.

    Every tensor-parallel rank holds the whole query and key norms and the whole output bias.
    """
    queries = model.num_attention_heads * model.kv_channels
    columns = queries + 2 * model.num_query_groups * model.kv_channels
    split = model.hidden_size * (columns + queries)
    split += columns if model.add_qkv_bias or model.add_bias_linear else 0
    split += model.num_attention_heads if model.attention_sinks else 0
    whole = (model.hidden_size if model.add_bias_linear else 0) + (2 * model.kv_channels if model.qk_layernorm else 0)
    return split // tp + whole


def _mamba(model: Model) -> int:
    """Return the number of a Mamba-2 layer's parameters: projections, convolution, inner norm, and three of each head."""
    projections = model.hidden_size * (projected_width(model) + inner_width(model))
    return projections + (CONVOLUTION + 1) * convolved_width(model) + inner_width(model) + 3 * heads(model)


def _gated(model: Model, width: int, ranks: int) -> int:
    """Return the number of a gated feed-forward's parameters. Every rank holds the whole last bias."""
    split = GATED_MATRICES * model.hidden_size * width + (2 * width if model.add_bias_linear else 0)
    return split // ranks + (model.hidden_size if model.add_bias_linear else 0)
