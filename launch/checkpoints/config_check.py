"""Compare a checkpoint's config.json with the recipe's model section.

If a decoder's mathematics does not fit its weights, it raises no error and computes nonsense. So every value that has a field
in the model section is compared. Values missing from config.json are not compared, except for rotary embeddings. The keys of
config.json are those of transformers' configuration classes.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from launch.checkpoints.parameter_map import GPT_OSS, architecture_of
from launch.contract.spec import Model

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
"""transformers' defaults for missing keys."""
ROTARY_DEFAULTS: Mapping[str, Config] = {
    "gpt_oss": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
}
"""transformers' default rotary scaling by model_type (models/gpt_oss/configuration_gpt_oss.py). Others have none."""
QK_NORM: Mapping[str, bool] = {"llama": False, "qwen3": True}
"""Whether queries and keys are normalised, for model types with the same tensors."""
CONSTANTS: Mapping[str, object] = {"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Values that all supported architectures share, so the model section has no field for them."""


def config_mismatches(model: Model, config: Config) -> tuple[str, ...]:
    """Return one text per difference: ``model.rotary_base=10000.0, but config.json says rope_theta=500000.0``.

    ``config`` may be any JSON object; a malformed one is reported and not compared.
    """
    if malformed := tuple(_malformed(config)):
        return malformed
    return (*_kind(model, config), *_sizes(model, config), *_rotary(model, config), *_windows(model, config))


def _malformed(config: Config) -> Iterator[str]:
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key), (dict, type(None))):
            yield f"config.json says {key}={reprlib.repr(config[key])}, which is not a JSON object"
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        yield f"config.json says layer_types={reprlib.repr(kinds)}, which is not a list of names"


def _kind(model: Model, config: Config) -> Iterator[str]:
    architecture = architecture_of(model)
    found = config.get("model_type")
    if found is not None and found not in architecture.model_types:
        found_text = reprlib.repr(found)
        yield f"the model section describes a model of {architecture.name}, but config.json says model_type={found_text}"
    elif (normalised := QK_NORM.get(found or "", model.qk_layernorm)) != model.qk_layernorm:
        found_text = (
            f"model_type={found!r}, which {'normalises' if normalised else 'does not normalise'} queries and keys"
        )
        yield f"model.qk_layernorm={model.qk_layernorm!r}, but config.json says {found_text}"
    for key, constant in CONSTANTS.items():
        if not _same(constant, config.get(key, constant)):
            found_text = reprlib.repr(config[key])
            yield f"model.activation={model.activation!r} has {key}={constant!r}, but config.json says {found_text}"


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
    """Compare rotary embeddings. transformers 5 writes ``rope_parameters``, earlier ones ``rope_theta`` and ``rope_scaling``."""
    rotary = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    model_type = config.get("model_type")
    default = ROTARY_DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {}
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or default
    rotary |= scaling
    yield from _compare(model, rotary, {"rope_theta": "rotary_base"})
    if not _same(1.0, rotary.get("partial_rotary_factor", 1.0)):
        found_text = reprlib.repr(rotary["partial_rotary_factor"])
        yield f"all of a head is rotated, but config.json says partial_rotary_factor={found_text}"
    if not {"rope_parameters", "rope_scaling", "model_type"} & set(config):
        # Someone wrote a part of a configuration by hand.
        return
    found = scaling.get("rope_type", scaling.get("type", "default"))
    if model.rope_scaling != ("none" if found == "default" else found):
        yield f"model.rope_scaling={model.rope_scaling!r}, but config.json says rope_type={reprlib.repr(found)}"
        return
    if model.rope_scaling == "yarn":
        rotary = {**YARN_DEFAULTS, **rotary}
        yield from _yarn_attention(model, rotary)
    yield from _compare(model, rotary, ROTARY_FIELDS[model.rope_scaling])


def _yarn_attention(model: Model, rotary: Config) -> Iterator[str]:
    """Compare the factor of cosines and sines, 0.1 ln(factor) + 1 (Peng et al., "YaRN", arXiv:2309.00071, equation 22)."""
    ours = 0.1 * math.log(model.rope_scaling_factor) + 1.0
    found = rotary.get("attention_factor")
    if found is not None and not (_is_number(found) and abs(found - ours) <= 1e-6 * ours):
        yield f"YaRN's attention factor is {ours!r}, but config.json says attention_factor={reprlib.repr(found)}"
    if rotary.get("mscale") and rotary.get("mscale_all_dim"):
        found_text = reprlib.repr(rotary["mscale"])
        yield f"YaRN's attention factor is {ours!r}, but config.json gives it by mscale={found_text}"


def _windows(model: Model, config: Config) -> Iterator[str]:
    ours = {number for number in range(model.num_layers) if model.window_of_layer(number)}
    theirs = _config_windows(config)
    if theirs is not None and ours != theirs:
        yield (
            f"model.window_size={model.window_size} with model.window_attn_skip_freq={model.window_attn_skip_freq} "
            f"gives a window to layers {sorted(ours)}, but config.json to {sorted(theirs)}"
        )
    if ours or theirs:
        yield from _compare(model, config, {"sliding_window": "window_size"})


def _config_windows(config: Config) -> set[int] | None:
    """Return the layers with a window, or None if config.json does not say."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return {number for number, kind in enumerate(kinds) if kind == "sliding_attention"}
    off = config.get("use_sliding_window") is False or config.get("sliding_window", 0) is None
    return set() if off else None


def _compare(model: Model, config: Config, fields: Mapping[str, str]) -> Iterator[str]:
    for key, field in fields.items():
        ours, found = getattr(model, field), config.get(key)
        if found is not None and not _same(ours, found):
            yield f"model.{field}={ours!r}, but config.json says {key}={reprlib.repr(found)}"


def _same(ours: object, found: object) -> bool:
    """Compare JSON values: 1 equals 1.0, but true does not equal 1."""
    return ours == found and isinstance(ours, bool) == isinstance(found, bool)


def _is_number(value: object) -> bool:
    """Return whether ``value`` is a number that float64 can represent. JSON has whole numbers of any length."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < sys.float_info.max
