"""The activations that a rank's forward pass keeps for its backward pass, in bytes per layer and micro-batch.

A layer keeps the inputs of matrix products and norms, and the arguments of attention and of the activation function. Autograd's
own hooks counted them on torch_native's layers (tests/numerics/test_forecast.py). Transformer Engine's modules keep the same,
with two exceptions: a router keeps its input without a cast, and the fused activation keeps no intermediate.

Two formulas are upper bounds, which no run has measured. A model that torch.compile compiles whole counts as eager, because the
partitioner keeps about as much or less for the backward pass (torch/_functorch/partitioners.py). With fp8, the inputs of matrix
products count in bf16, although Transformer Engine 2.11 keeps one-byte casts of them (pytorch/module/linear.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from analysis.memory.static_memory import BYTES, Part
from launch.contract.mamba_sizes import inner_width, projected_width
from launch.contract.model_flops import mlp_width
from launch.contract.spec import LayerPart, RunSpec

FP32 = 4
SCORES = 3 * FP32
"""Bytes of logits, scores and probabilities per token and expert."""
CHOICE_INDICES = 4 * 8
"""Bytes of the int64 indices of a token's row, there and back."""


@dataclass(frozen=True)
class Rows:
    """Tokens of a micro-batch that a rank's experts compute: ``mean`` with an even load, and at most ``worst``.

    ``fixed`` says whether buffers do not depend on the routing.
    """

    mean: int
    worst: int
    fixed: bool


def expert_rows(spec: RunSpec) -> Rows:
    """Return the rows of a layer with experts."""
    model, layout = spec.model, spec.parallelism
    tokens = routed_tokens(spec)
    group, local = layout.ep * layout.etp, model.num_moe_experts // layout.ep
    worst = tokens * group * min(model.moe_router_topk, local)
    even, ep = tokens * layout.etp * model.moe_router_topk, layout.ep
    if model.moe_expert_capacity_factor is not None:
        capacity = math.ceil(tokens * model.moe_router_topk / model.num_moe_experts * model.moe_expert_capacity_factor)
        rows = capacity * local * group
        return (
            Rows(rows, rows, True)
            if model.moe_pad_expert_input_to_capacity
            else Rows(min(even, rows), min(worst, rows), ep == 1)
        )
    if spec.engine == "torch_native" and layout.dispatcher == "allgather" and ep > 1:
        return Rows(worst, worst, True)
    return Rows(even, worst, ep == 1)


def tokens_of(spec: RunSpec) -> int:
    """Return the tokens of a micro-batch on a rank, within a tensor-parallel region."""
    return spec.training.micro_batch_size * spec.training.sequence_length // spec.parallelism.cp


def routed_tokens(spec: RunSpec) -> int:
    """Return the tokens that a rank routes. Each tensor-parallel rank routes its shard of the sequence."""
    return tokens_of(spec) // spec.parallelism.tp


def sharded_tokens(spec: RunSpec) -> int:
    """Return the tokens outside of tensor-parallel regions."""
    return routed_tokens(spec) if spec.parallelism.sequence_parallel else tokens_of(spec)


def layer_bytes(spec: RunSpec, parts: tuple[LayerPart, ...]) -> dict[Part, int]:
    """Return the bytes that a layer with ``parts`` keeps per micro-batch, by its parts, with an even load of experts.

    Hidden dropout keeps a mask, one byte for each element, of what attention and of what the MLP or the experts add. Fused
    attention draws its mask again.
    """
    kept = _bytes_without_masks(spec, parts)
    if spec.model.hidden_dropout:
        for part in parts:
            kept[part] += sharded_tokens(spec) * spec.model.hidden_size
    return kept


def _bytes_without_masks(spec: RunSpec, parts: tuple[LayerPart, ...]) -> dict[Part, int]:
    model, element = spec.model, BYTES[spec.training.precision]
    norms = len(parts) * sharded_tokens(spec) * model.hidden_size * element
    kept: dict[Part, int] = {}
    if "attention" in parts:
        kept["attention"] = norms + _attention(spec, element)
    if "mamba" in parts:
        kept["mamba"] = norms + tokens_of(spec) * _mamba_elements(spec) * element
    if width := mlp_width(model, parts):
        inner = width * tensors_of_width(spec, weighted=False) // spec.parallelism.tp
        kept["mlp"] = tokens_of(spec) * element * (model.hidden_size + inner) + (0 if "attention" in parts else norms)
    if "experts" in parts:
        kept["router"] = _router_input(spec) + routed_tokens(spec) * (
            model.num_moe_experts * SCORES + model.moe_router_topk * CHOICE_INDICES
        )
        kept["experts"] = expert_rows(spec).mean * row_bytes(spec)
    return kept


def recomputed_bytes(spec: RunSpec, parts: tuple[LayerPart, ...]) -> dict[Part, int]:
    """Return the bytes that selective recomputation saves in a layer with ``parts``."""
    has_experts = "experts" in parts
    model, layout, modules = spec.model, spec.parallelism, spec.training.recomputed
    element, tokens = BYTES[spec.training.precision], tokens_of(spec)
    normed = tokens * model.hidden_size * element if "layernorm" in modules else 0
    softmax = tokens * model.num_attention_heads // layout.tp * FP32 if "core_attn" in modules else 0
    less: dict[Part, int] = {"attention": normed + softmax} if "attention" in parts else {}
    kept = _bytes_without_masks(spec, parts)
    if "mlp" in kept:
        whole = ("shared_experts" if has_experts else "mlp") in modules
        less["mlp"] = kept["mlp"] - tokens * model.hidden_size * element if whole else normed
    if has_experts and "moe" in modules:
        less |= {"router": kept["router"] - _router_input(spec), "experts": kept["experts"]}
    elif has_experts:
        less["router"] = normed // layout.tp if _router_input(spec) else 0
        inner = (tensors_of_width(spec, weighted=True) - 2) * model.moe_ffn_hidden_size // layout.etp * element
        less["experts"] = expert_rows(spec).mean * inner if "moe_act" in modules else 0
    return less


def _router_input(spec: RunSpec) -> int:
    """Return the bytes of the router's input. torch_native's shared expert keeps it already, if it is whole."""
    model, layout = spec.model, spec.parallelism
    if spec.engine == "torch_native" and model.moe_shared_expert_ffn_hidden_size and layout.tp == 1:
        return 0
    return routed_tokens(spec) * model.hidden_size * BYTES[spec.training.precision]


def row_bytes(spec: RunSpec) -> int:
    """Return the bytes that an expert keeps per row: its input, and tensors of its width."""
    model, element = spec.model, BYTES[spec.training.precision]
    inner = model.moe_ffn_hidden_size * tensors_of_width(spec, weighted=True) // spec.parallelism.etp
    # Which expert a row belongs to, for the last bias.
    mask = (
        model.num_moe_experts // spec.parallelism.ep if model.add_bias_linear and spec.engine == "torch_native" else 0
    )
    return element * (model.hidden_size + inner) + mask


def tensors_of_width(spec: RunSpec, weighted: bool) -> int:
    """Return how many tensors of its own width a gated feed-forward keeps, ``weighted`` by the router or not.

    Two hold gate and up, and one is the input of the last product. A fused or compiled layer keeps nothing else. Otherwise the
    activation function keeps intermediates. SiLU keeps its result. The clamped function keeps gate, up and two factors;
    Megatron-Core's compiler saves one of them.
    """
    clamped = spec.model.activation == "clamped_quick_gelu_glu"
    native = spec.engine == "torch_native"
    if (native and spec.training.compile == "elementwise") or (not native and not clamped):
        return 3
    return 3 + ((4 if native else 3) if clamped else 1) + weighted


def _attention(spec: RunSpec, element: int) -> int:
    """Return the bytes of attention without those of norms.

    It keeps the input of the first product, queries, keys and values before and after rotation, and the
    result.
    """
    model, layout = spec.model, spec.parallelism
    queries = model.num_attention_heads * model.kv_channels // layout.tp
    keys = model.num_query_groups * model.kv_channels // layout.tp
    inside = model.hidden_size + (queries + 2 * keys) + (queries + keys) + queries
    softmax = model.num_attention_heads // layout.tp * FP32
    # In fp8 the output projection keeps a cast of the result beside the one that attention keeps.
    cast = 0 if spec.training.fp8 == "none" else queries
    return tokens_of(spec) * (inside * element + softmax + cast)


def _mamba_elements(spec: RunSpec) -> int:
    """Return the elements that a Mamba-2 layer keeps per token, without those of its first norm.

    These are the input and output of the first product, and the scan's result, once as it is, once normed. The backward pass
    computes the convolution and the states again (mamba_ssm 2.3.2 ops/triton/ssd_combined.py:883).
    """
    return spec.model.hidden_size + projected_width(spec.model) + 2 * inner_width(spec.model)


def logits_bytes(spec: RunSpec) -> int:
    """Return the most bytes that logits and loss of a micro-batch take on the last stage.

    These are logits in training precision and in fp32, and their softmax in fp32. A compiled loss takes only logits and their
    gradient. torch_native's eager loss takes most in its backward pass: the softmax and two gradients, all in fp32. With several
    tensor-parallel ranks torch_native shifts and exponentiates separately. Megatron-Core writes the softmax over its fp32 logits
    (tensor_parallel/cross_entropy.py), except in its fused loss, whose compiled parts each return a new tensor. Runs in fp32 and
    deterministic ones do not fuse it.
    """
    training, layout = spec.training, spec.parallelism
    element, native = BYTES[training.precision], spec.engine == "torch_native"
    in_place = not native and (training.deterministic or training.precision == "fp32")
    logits = element if element < FP32 else 0
    if native and layout.tp > 1:
        copies = logits + 3 * FP32
    elif native:
        copies = 2 * element if training.compile == "elementwise" else 3 * FP32
    else:
        copies = logits + (1 if in_place else 2) * FP32
    return tokens_of(spec) * spec.model.vocab_size // layout.tp * copies
