"""Where config.json, which lies beside a checkpoint, speaks of another model than the recipe does. Pure.

A decoder with other mathematics than its weights were trained with fails nowhere and is wrong everywhere, so every
value that has a field in the model section is compared. What config.json leaves out is not, but for YaRN. Its keys are those of
transformers' configuration classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from launch.hugging_face.layout import GPT_OSS, architecture_of
from launch.spec import Model

Config = Mapping[str, Any]

FIELDS: Mapping[str, str] = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
    "attention_bias": "add_qkv_bias",
    "mlp_bias": "add_bias_linear",
}
EXPERT_FIELDS: Mapping[str, str] = {
    "num_experts": "num_moe_experts",
    "num_local_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "experts_per_token": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
}
ROTARY_FIELDS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    "llama3": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "rope_original_max_position",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "rope_original_max_position",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "truncate": "rope_truncate",
    },
}
YARN_DEFAULTS: Config = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""What transformers takes where config.json leaves it out."""
CONSTANTS: Mapping[str, object] = {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""What the architectures that are read have in common, and the model section has therefore no field for."""


def disagreements(model: Model, config: Config) -> tuple[str, ...]:
    """One text a value: ``model.rotary_base=10000.0, but config.json says rope_theta=500000.0``."""
    return (*_kind(model, config), *_sizes(model, config), *_rotary(model, config), *_windows(model, config))


def _kind(model: Model, config: Config) -> Iterator[str]:
    architecture = architecture_of(model)
    found = config.get("model_type")
    if found is not None and found not in architecture.model_types:
        yield f"the model section describes one of {architecture.name}, but config.json says model_type={found!r}"
    for key, constant in CONSTANTS.items():
        if config.get(key, constant) != constant:
            yield f"model.activation={model.activation!r} has {key}={constant!r}, but config.json says {config[key]!r}"


def _sizes(model: Model, config: Config) -> Iterator[str]:
    fields = dict(FIELDS)
    if architecture_of(model) is GPT_OSS:
        fields["intermediate_size"] = "moe_ffn_hidden_size"
    elif model.has_dense_layers:
        fields["intermediate_size"] = "ffn_hidden_size"
    if model.is_moe:
        fields |= EXPERT_FIELDS
    yield from _compare(model, config, fields)
    if model.is_moe and model.moe_router_order == "softmax_then_topk":
        yield from _compare(model, config, {"norm_topk_prob": "moe_router_normalize_topk"})


def _rotary(model: Model, config: Config) -> Iterator[str]:
    """transformers 5 writes one ``rope_parameters``; before, ``rope_theta`` stood beside a ``rope_scaling``."""
    rotary = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotary |= scaling
    yield from _compare(model, rotary, {"rope_theta": "rotary_base"})
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"all of a head is rotated, but config.json says partial_rotary_factor={rotary['partial_rotary_factor']!r}"
    if not {"rope_parameters", "rope_scaling"} & set(config):
        return
    found = scaling.get("rope_type", scaling.get("type", "default"))
    if model.rope_scaling != {"default": "none"}.get(found, found):
        yield f"model.rope_scaling={model.rope_scaling!r}, but config.json says rope_type={found!r}"
        return
    if model.rope_scaling == "yarn":
        rotary = {**YARN_DEFAULTS, **rotary}
        yield from _yarn_attention(model, rotary)
    yield from _compare(model, rotary, ROTARY_FIELDS[model.rope_scaling])


def _yarn_attention(model: Model, rotary: Config) -> Iterator[str]:
    """The factor of cosines and sines: 0.1 ln(factor) + 1 (Peng et al., "YaRN", arXiv:2309.00071, equation 22)."""
    ours = 0.1 * math.log(model.rope_scaling_factor) + 1.0
    found = rotary.get("attention_factor")
    if found is not None and not math.isclose(found, ours, rel_tol=1e-6):
        yield f"YaRN's attention factor is {ours!r}, but config.json says attention_factor={found!r}"
    if rotary.get("mscale") and rotary.get("mscale_all_dim"):
        yield f"YaRN's attention factor is {ours!r}, but config.json gives it by mscale={rotary['mscale']!r}"


def _windows(model: Model, config: Config) -> Iterator[str]:
    ours, theirs = _windowed(model), _windowed_by(config)
    if theirs is not None and ours != theirs:
        yield (
            f"model.window_size={model.window_size} with model.window_attn_skip_freq={model.window_attn_skip_freq} "
            f"gives a window to layers {sorted(ours)}, but config.json to {sorted(theirs)}"
        )
    if ours or theirs:
        yield from _compare(model, config, {"sliding_window": "window_size"})


def _windowed(model: Model) -> set[int]:
    return {number for number in range(model.num_layers) if model.window_of_layer(number)}


def _windowed_by(config: Config) -> set[int] | None:
    """None where config.json leaves it open."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return {number for number, kind in enumerate(kinds) if kind == "sliding_attention"}
    off = config.get("use_sliding_window") is False or config.get("sliding_window", 0) is None
    return set() if off else None


def _compare(model: Model, config: Config, fields: Mapping[str, str]) -> Iterator[str]:
    for key, field in fields.items():
        ours, found = getattr(model, field), config.get(key)
        if found is not None and found != ours:
            yield f"model.{field}={ours!r}, but config.json says {key}={found!r}"
