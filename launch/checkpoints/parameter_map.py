"""A table from the tensors of a Hugging Face checkpoint to our parameters.

Names and shapes are those of transformers' models (models/llama, qwen3, qwen3_moe, gpt_oss) and of the published checkpoints.
Qwen3-MoE has one tensor per expert. GPT-OSS stacks experts and interleaves gate and up; its published files pack them as MXFP4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from launch.contract.spec import Model

Form = Literal["rows", "experts", "interleaved", "packed", "packed_interleaved"]
"""How tensors become a parameter:

* ``rows``: concatenated along the first axis;
* ``experts``: an equal number of tensors per expert, concatenated and transposed: linear layers store (outputs, inputs), our
  experts (inputs, outputs);
* ``interleaved``: one tensor whose last axis alternates gate and up; ours holds all of gate, then all of up;
* ``packed``: MXFP4 blocks and scales along the inputs of (experts, outputs, inputs), transposed like ``experts``;
* ``packed_interleaved``: the same with outputs that alternate gate and up.
"""

MXFP4_BLOCK = 32
"""The number of values that share a scale (OCP Microscaling Formats 1.0, section 5.2). A byte contains two values."""


@dataclass(frozen=True)
class Expected:
    """A tensor that the checkpoint must have. A ``packed`` tensor contains bytes; all others contain floating-point numbers."""

    name: str
    shape: tuple[int, ...]
    packed: bool = False


@dataclass(frozen=True)
class Entry:
    """One of our parameters and its source tensors, in order."""

    parameter: str
    tensors: tuple[Expected, ...]
    form: Form = "rows"


@dataclass(frozen=True)
class Architecture:
    """A family of checkpoints with the same tensor names, and the model fields whose values it fixes."""

    name: str
    model_types: tuple[str, ...]
    """Values of ``model_type`` in config.json."""
    fixed: Mapping[str, object]


_NONE_HAS = {"moe_shared_expert_ffn_hidden_size": 0, "moe_router_enable_expert_bias": False}
_PLAIN = {"add_qkv_bias": False, "add_bias_linear": False, "attention_sinks": False, "window_size": 0} | _NONE_HAS
_SOFTMAX = {"moe_router_score_function": "softmax"}

DENSE = Architecture("Llama and Qwen3", ("llama", "qwen3"), _PLAIN | {"activation": "swiglu"})
QWEN3_MOE = Architecture("Qwen3-MoE", ("qwen3_moe",), _PLAIN | _SOFTMAX | {"qk_layernorm": True})
GPT_OSS = Architecture(
    "GPT-OSS",
    ("gpt_oss",),
    _NONE_HAS
    | _SOFTMAX
    | {
        "add_qkv_bias": True,
        "add_bias_linear": True,
        "attention_sinks": True,
        "qk_layernorm": False,
        "moe_router_order": "topk_then_softmax",
        "moe_layer_freq": 1,
    },
)


def architecture_of(model: Model) -> Architecture:
    """Return the architecture whose names the checkpoint of ``model`` must have, by its kind of feed-forward layer."""
    if not model.is_moe:
        return DENSE
    return GPT_OSS if model.activation == "clamped_quick_gelu_glu" else QWEN3_MOE


def shape_mismatches(model: Model) -> tuple[str, ...]:
    """Return a text for each field of ``model`` that does not fit its architecture: ``model.qk_layernorm=False, not True``."""
    fixed = architecture_of(model).fixed
    return tuple(
        f"model.{name}={getattr(model, name)!r}, not {value!r}"
        for name, value in fixed.items()
        if getattr(model, name) != value
    )


def table(model: Model, packed: bool = False) -> tuple[Entry, ...]:
    """Return every parameter of a decoder for ``model``, which launch/support/layout.py must accept. No tensor occurs twice.

    Args:
        packed: whether the experts of GPT-OSS are MXFP4. ``hidden_size`` and ``moe_ffn_hidden_size`` are then whole blocks.
    """
    return tuple(_entries(model, packed))


def _entries(model: Model, packed: bool) -> Iterator[Entry]:
    hidden, vocabulary = model.hidden_size, model.vocab_size
    yield _entry("embedding.weight", ("model.embed_tokens.weight", vocabulary, hidden))
    for number in range(model.num_layers):
        ours, theirs = f"layers.{number}", f"model.layers.{number}"
        yield _entry(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight", hidden))
        yield from _attention(model, f"{ours}.attention", f"{theirs}.self_attn")
        yield _entry(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight", hidden))
        yield from _feed_forward(model, number, f"{ours}.mlp", f"{theirs}.mlp", packed)
    yield _entry("final_norm.weight", ("model.norm.weight", hidden))
    if not model.tie_embeddings:
        yield _entry("head.weight", ("lm_head.weight", vocabulary, hidden))


def _attention(model: Model, ours: str, theirs: str) -> Iterator[Entry]:
    hidden, queries = model.hidden_size, model.num_attention_heads * model.kv_channels
    keys = model.num_query_groups * model.kv_channels
    rows = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
    yield _entry(f"{ours}.qkv.weight", *((f"{theirs}.{name}.weight", count, hidden) for name, count in rows))
    yield _entry(f"{ours}.output.weight", (f"{theirs}.o_proj.weight", hidden, queries))
    if model.add_qkv_bias:
        yield _entry(f"{ours}.qkv.bias", *((f"{theirs}.{name}.bias", count) for name, count in rows))
    if model.add_bias_linear:
        yield _entry(f"{ours}.output.bias", (f"{theirs}.o_proj.bias", hidden))
    if model.qk_layernorm:
        yield _entry(f"{ours}.query_norm.weight", (f"{theirs}.q_norm.weight", model.kv_channels))
        yield _entry(f"{ours}.key_norm.weight", (f"{theirs}.k_norm.weight", model.kv_channels))
    if model.attention_sinks:
        yield _entry(f"{ours}.sinks", (f"{theirs}.sinks", model.num_attention_heads))


def _feed_forward(model: Model, number: int, ours: str, theirs: str, packed: bool) -> Iterator[Entry]:
    # As in Megatron-Core, a frequency of n gives experts to layers 0, n, 2n and so on.
    if "experts" not in model.parts_of_layer(number):
        return _dense(model, ours, theirs)
    if architecture_of(model) is GPT_OSS:
        return _gpt_oss_experts(model, ours, theirs, packed)
    return _qwen3_experts(model, ours, theirs)


def _dense(model: Model, ours: str, theirs: str) -> Iterator[Entry]:
    hidden, width = model.hidden_size, model.ffn_hidden_size
    gate_up = ((f"{theirs}.{name}.weight", width, hidden) for name in ("gate_proj", "up_proj"))
    yield _entry(f"{ours}.gate_up.weight", *gate_up)
    yield _entry(f"{ours}.down.weight", (f"{theirs}.down_proj.weight", hidden, width))


def _qwen3_experts(model: Model, ours: str, theirs: str) -> Iterator[Entry]:
    hidden, width, experts = model.hidden_size, model.moe_ffn_hidden_size, range(model.num_moe_experts)
    yield _entry(f"{ours}.router.weight", (f"{theirs}.gate.weight", len(experts), hidden))
    gate_up = (
        (f"{theirs}.experts.{expert}.{name}.weight", width, hidden)
        for expert in experts
        for name in ("gate_proj", "up_proj")
    )
    yield _entry(f"{ours}.gate_up", *gate_up, form="experts")
    down = ((f"{theirs}.experts.{expert}.down_proj.weight", hidden, width) for expert in experts)
    yield _entry(f"{ours}.down", *down, form="experts")


def _gpt_oss_experts(model: Model, ours: str, theirs: str, packed: bool) -> Iterator[Entry]:
    hidden, width, experts = model.hidden_size, model.moe_ffn_hidden_size, model.num_moe_experts
    yield _entry(f"{ours}.router.weight", (f"{theirs}.router.weight", experts, hidden))
    yield _entry(f"{ours}.router.bias", (f"{theirs}.router.bias", experts))
    gate_up, down = f"{theirs}.experts.gate_up_proj", f"{theirs}.experts.down_proj"
    if packed:
        yield Entry(f"{ours}.gate_up", _packed(gate_up, experts, 2 * width, hidden), "packed_interleaved")
        yield Entry(f"{ours}.down", _packed(down, experts, hidden, width), "packed")
    else:
        yield _entry(f"{ours}.gate_up", (gate_up, experts, hidden, 2 * width), form="interleaved")
        yield _entry(f"{ours}.down", (down, experts, width, hidden))
    yield _entry(f"{ours}.gate_up_bias", (f"{gate_up}_bias", experts, 2 * width), form="interleaved")
    yield _entry(f"{ours}.down_bias", (f"{down}_bias", experts, hidden))


def _entry(parameter: str, *tensors: tuple[str, *tuple[int, ...]], form: Form = "rows") -> Entry:
    return Entry(parameter, tuple(Expected(name, tuple(shape)) for name, *shape in tensors), form)


def _packed(name: str, experts: int, outputs: int, inputs: int) -> tuple[Expected, Expected]:
    blocks = inputs // MXFP4_BLOCK
    return (
        Expected(f"{name}_blocks", (experts, outputs, blocks, MXFP4_BLOCK // 2), packed=True),
        Expected(f"{name}_scales", (experts, outputs, blocks), packed=True),
    )
