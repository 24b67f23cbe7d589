"""The settings of a recipe that flags of Megatron-LM mean, also by their absence. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from launch.megatron_config.field_names import DEPRECATED, FIELDS
from orchestrator.errors import InputError, input_error
from orchestrator.export.megatron_flags import Flags, is_number, parse_flags, spell_flag
from orchestrator.recipe.expand import parse_setting

DEFAULTS = {
    "model.norm_epsilon": 1e-5, "model.add_bias_linear": True, "model.tie_embeddings": True, "model.moe_router_topk": 2,
    "model.attention_dropout": 0.1, "model.hidden_dropout": 0.1, "parallelism.dispatcher": "allgather",
    "training.adam_beta2": 0.999, "training.gradient_accumulation_fusion": True,
}  # fmt: skip
"""Megatron-LM's defaults that differ from a recipe's."""
SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"training.precision": "bf16"},
    "swiglu": {"model.activation": "swiglu"},
    "quick_geglu": {"model.activation": "clamped_quick_gelu_glu"},
    "disable_bias_linear": {"model.add_bias_linear": False},
    "untie_embeddings_and_output_weights": {"model.tie_embeddings": False},
    "use_rope_scaling": {"model.rope_scaling": "llama3", "model.rope_original_max_position": 8192},
    "moe_router_pre_softmax": {"model.moe_router_normalize_topk": False},
    "no_gradient_accumulation_fusion": {"training.gradient_accumulation_fusion": False},
    "grad_reduce_in_bf16": {"training.gradient_precision": "bf16"},
    "recompute_activations": {"training.recompute": "selective"},
    "mock_data": {"data.kind": "synthetic"},
    "optimizer_cuda_graph": {"cuda_graph.optimizer": True, "training.capturable_optimizer": True},
    **{switch: {field: value} for switch, (field, value) in DEPRECATED.items()},
}
"""Flags without words, and the settings that they mean."""


def _data_sets(words: Sequence[str]) -> Sequence[str]:
    """Return the paths after ``--data-path``, the one with the largest weight first. Weights are optional: 0.7 a 0.3 b."""
    try:
        weighted = list(zip(map(float, words[::2]), words[1::2], strict=True))
    except ValueError:
        return words
    return [path for _, path in sorted(weighted, key=lambda pair: -pair[0])]


def _layers(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings of a hybrid model's pattern, which also gives the number of layers."""
    return {"model.hybrid_override_pattern": words[0], "model.num_layers": len(words[0])}


VALUES: Mapping[str, Callable[[Sequence[str]], Mapping[str, Any]]] = {
    "data_path": lambda words: {"data.kind": "indexed", "data.path": _data_sets(words)[0]},
    "window_size": lambda words: {"model.window_size": int(re.findall(r"-?\d+", " ".join(words))[0]) + 1},
    "softmax_type": lambda words: {"model.attention_sinks": {"vanilla": False, "learnable": True}[words[0]]},
    "fp8_format": lambda words: {"training.fp8": "delayed"},
    **dict.fromkeys(("hybrid_override_pattern", "hybrid_layer_pattern"), _layers),
}
"""Flags whose words are not those of a recipe. The functions raise LookupError or ValueError for words that no recipe has."""
NEEDED = {
    "normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "lr_decay_style": "linear",
    "moe_router_dtype": "that of the weights",
}  # fmt: skip
"""Flags whose only value in the engine differs from Megatron-LM's default, each with that default."""
ENOUGH_STEPS = 120
"""Steps of a recipe without ``--train-iters``. A verdict of EQUIVALENT needs 100 after the capture."""
EXPAND = "let the shell expand it: put echo before the command, and paste what that prints"


def as_overrides(words: Iterable[str]) -> list[str]:
    """Return the recipe overrides that mean the same as Megatron's flags among ``words``."""
    known = {name: given for name, given in parse_flags(words).items() if _knows(name)}
    return [f"{field}={_spell(value)}" for field, value in settings_of(known, complete=False).items()]


def _spell(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _knows(name: str) -> bool:
    return name in FIELDS or name in SWITCHES or name in VALUES


def settings_of(flags: Flags, complete: bool = True) -> dict[str, Any]:
    """Return the settings that ``flags`` mean. With ``complete``, add those that follow from them."""
    settings: dict[str, Any] = {}
    for name, words in flags.items():
        settings |= _setting(name, words)
    return settings | (_derived(flags, settings) if complete else {})


def _setting(name: str, words: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings that one flag means.

    Raises:
        InputError: the flag lacks a value, or no recipe takes its value.
    """
    flag = spell_flag(name, words)
    if _knows(name) and any("$" in word for word in words):
        raise input_error(flag, f"the shell has not expanded {' '.join(words)}", EXPAND)
    if name in SWITCHES:
        if words:
            raise input_error(flag, "Megatron-LM's flag takes no value", f"write {spell_flag(name)}, or leave it out")
        return SWITCHES[name]
    try:
        if name in VALUES:
            return VALUES[name](words)
        if name in FIELDS and not _is_noted(name, words):
            return dict([parse_setting(f"{FIELDS[name]}={','.join(words) if words else 'true'}", flag)])
    except (LookupError, ValueError, InputError) as error:
        if not words:
            raise input_error(flag, "it has no value", "write the value after it, or leave the flag out") from None
        if isinstance(error, InputError):
            raise
        raise input_error(flag, "no recipe takes this value", "docs/recipes.md lists what recipes take") from None
    return {}


def _is_noted(name: str, words: Sequence[str]) -> bool:
    """Return whether no recipe has this value of a flag, so that a note must say what the cells do."""
    if name == "moe_layer_freq":
        return "[" in "".join(words)
    return name in NEEDED and bool(words) and words[0] not in ("constant", "cosine")


def moe_frequency(words: Sequence[str]) -> int:
    """Return N if ``words`` are a pattern of layers in which every N-th layer has experts, else 0."""
    try:
        pattern = _pattern(ast.parse("".join(words), mode="eval").body)
    except (SyntaxError, TypeError, ValueError):
        return 0
    every = range(1, len(pattern) + 1)
    return next((n for n in every if pattern == [int(layer % n == 0) for layer in range(len(pattern))]), 0)


def _pattern(node: ast.expr) -> list[int]:
    """Return the items of an expression such as ``([1]+[0]*3)*2``.

    Raises:
        ValueError: it has another form.
    """
    match node:
        case ast.List(items):
            return [int(ast.literal_eval(item)) for item in items]
        case ast.BinOp(left, ast.Add(), right):
            return _pattern(left) + _pattern(right)
        case ast.BinOp(left, ast.Mult(), ast.Constant(int(times))) if times < 1000:
            return _pattern(left) * times
    raise ValueError


def _number(flags: Flags, name: str, default: int = 0) -> int:
    """Return the positive number after a flag.

    Raises:
        InputError: the value is not a positive number, or the flag is missing and has no ``default``.
    """
    words = flags.get(name, [str(default)] if default else [])
    if is_number(words) and len(words) == 1:
        return int(words[0])
    message = (
        "it is not a positive whole number" if name in flags else "it is missing, but other values are computed from it"
    )
    raise input_error(spell_flag(name, words), message, f"write for example {spell_flag(name, ['8'])}")


def _derived(flags: Flags, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that Megatron-LM computes for missing flags."""
    derived: dict[str, Any] = {}
    if "group_query_attention" not in flags:
        derived["model.num_query_groups"] = _number(flags, "num_attention_heads")
    if "kv_channels" not in flags:
        derived["model.kv_channels"] = _number(flags, "hidden_size") // _number(flags, "num_attention_heads")
    if "ffn_hidden_size" not in flags:
        hidden = _number(flags, "hidden_size")
        # megatron/training/arguments.py, validate_args
        derived["model.ffn_hidden_size"] = int(hidden * 8 / 3) // 64 * 64 if "swiglu" in flags else 4 * hidden
    if "num_experts" in flags and "moe_ffn_hidden_size" not in flags:
        derived["model.moe_ffn_hidden_size"] = derived.get(
            "model.ffn_hidden_size", settings.get("model.ffn_hidden_size")
        )
    if "vocab_size" in flags and "padded_vocab_size" not in flags:
        multiple = _number(flags, "make_vocab_size_divisible_by", 128) * _number(flags, "tensor_model_parallel_size", 1)
        tokens = _number(flags, "vocab_size") + (flags.get("tokenizer_type") == ["NullTokenizer"])
        derived["model.vocab_size"] = -(-tokens // multiple) * multiple
    if flags.get("fp8_recipe") == ["tensorwise"]:
        derived["training.fp8"] = "current"
    if all(flags.get(name) == ["bf16"] for name in ("exp_avg_dtype", "exp_avg_sq_dtype")):
        derived["training.optimizer_precision"] = "lean"
    if "num_experts" not in flags:
        derived["model.moe_router_topk"] = 0
    if "train_iters" not in flags:
        derived["training.steps"] = ENOUGH_STEPS
    later = not flags.keys().isdisjoint(
        {"cuda_graph_modules", "optimizer_cuda_graph", "hybrid_layer_pattern"}
    ) or flags.get("cuda_graph_impl") == ["full_iteration"]
    return derived | _derived_layout(flags, settings) | {"megatron_core": "0.19" if later else "0.16"}


def _derived_layout(flags: Flags, settings: Mapping[str, Any]) -> dict[str, Any]:
    derived: dict[str, Any] = {}
    if "num_experts" in flags and "expert_tensor_parallel_size" not in flags:
        # megatron/core/parallel_state.py, initialize_model_parallel
        derived["parallelism.etp"] = _number(flags, "tensor_model_parallel_size", 1)
    if _number(flags, "tensor_model_parallel_size", 1) == 1:
        derived["parallelism.sequence_parallel"] = False  # as validate_args does
    if "num_layers_per_virtual_pipeline_stage" in flags:
        derived["parallelism.vpp"] = _virtual_stages(flags)
    if derived.get("parallelism.vpp", settings.get("parallelism.vpp", 1)) > 1:
        derived["parallelism.schedule"] = "interleaved"
    return derived


def _virtual_stages(flags: Flags) -> int:
    name = "num_layers_per_virtual_pipeline_stage"
    layers, each = (
        _number(flags, "num_layers") // _number(flags, "pipeline_model_parallel_size", 1),
        _number(flags, name),
    )
    if layers % each:
        raise input_error(
            spell_flag(name, flags[name]), f"a pipeline stage has {layers} layers", "write a divisor of that"
        )
    return layers // each
