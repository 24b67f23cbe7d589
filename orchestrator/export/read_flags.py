"""Read the flags of Megatron-LM's training scripts as a recipe. This is the reverse of ``export``. Pure."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from launch.contract.spec import SECTIONS, RunSpec, spec_to_json
from launch.megatron_config.absent_fields import absent_field
from launch.megatron_config.field_names import DEPRECATED, FIELDS
from orchestrator.errors import InputError, input_error
from orchestrator.export import megatron_lm
from orchestrator.recipe.aliases import canonical_values
from orchestrator.recipe.expand import parse_setting
from orchestrator.recipe.yaml_reader import NAME, dump

MANY_STEPS = 1000
"""More steps than a verdict needs by far: the command line is that of a whole training."""
Flags = Mapping[str, Sequence[str]]
"""The words after each flag. The key is the flag's name with underscores, or includes its single dash (``-p``)."""
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
ASSUMED = {
    "model.vocab_size": ("vocab_size", "padded_vocab_size"), "data.kind": ("data_path", "mock_data"),
    "training.steps": ("train_iters",), "training.learning_rate": ("lr",),
    "training.global_batch_size": ("global_batch_size",),
}  # fmt: skip
"""Fields for which a recipe takes its own value if none of these flags is given."""
ENOUGH_STEPS = 120
"""Steps of a recipe without ``--train-iters``. A verdict of EQUIVALENT needs 100 after the capture."""
DROPS = "moe_expert_rank_capacity_factor"
NODES = {"nnodes": "nodes", "nproc_per_node": "gpus_per_node"}
"""Flags of torchrun."""
EXPAND = "let the shell expand it: put echo before the command, and paste what that prints"
SAID_ELSEWHERE = {"vocab_size", "tokenizer_type", "max_position_embeddings", "group_query_attention", "make_vocab_size_divisible_by",
                  "num_layers_per_virtual_pipeline_stage", *SWITCHES}  # fmt: skip


class ReadFlags(NamedTuple):
    """A recipe as YAML, and notes on flags that it does not express."""

    text: str
    notes: tuple[str, ...]


def read_command(command: str) -> ReadFlags:
    """Return the recipe of a command line with flags of Megatron-LM.

    Raises:
        InputError: a flag has a value that no recipe takes, or the command has no flags.
    """
    words = _command_words(command)
    script = next((number for number, word in enumerate(words) if word.endswith(".py")), -1)
    launcher, own = parse_flags(words[: script + 1]), words[script + 1 :]
    flags = parse_flags(own)
    _check(own, flags)
    if frequency := _frequency(flags.get("moe_layer_freq", ())):
        flags = {**flags, "moe_layer_freq": [str(frequency)]}
    spec = _spec(DEFAULTS | _settings(flags))
    sizes = {NODES[name]: int(words[0]) for name, words in launcher.items() if name in NODES and _is_number(words)}
    name = _name(flags, words[script] if script >= 0 else "")
    return ReadFlags(_recipe(name, spec, sizes), (*_notes_on_words(launcher, own), *_notes(flags, spec)))


def _check(words: Sequence[str], flags: Flags) -> None:
    """Raise InputError if a shell variable may stand for flags, if there are no flags, or if two exclude each other."""
    values = ((before, word) for before, word in pairwise(["", *words]) if word.startswith("$"))
    if lost := [word for before, word in values if "[@]" in word or not before.startswith("-")]:
        raise input_error("--from-megatron-flags", f"the shell has not expanded {lost[0]}", EXPAND)
    if not flags:
        raise input_error("--from-megatron-flags", "it has no flags", "write 'pretrain_gpt.py --num-layers 8 ...'")
    if {"bf16", "fp16"} <= flags.keys():
        raise input_error("--fp16", "--bf16 is given too, and Megatron-LM refuses both", "keep one of them")


def _command_words(command: str) -> list[str]:
    """Return the words of the longest command in a shell line, without its redirections."""
    # The 2 of 2>&1 is not a word.
    lexer = shlex.shlex(
        re.sub(r"(?<=\s)\d+(?=[<>])", "", command.replace("\\\n", " ")), posix=True, punctuation_chars="|&;<>"
    )
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        commands = groupby(lexer, key=lambda word: not set(word) <= set("|&;<>"))
        return max((list(words) for is_command, words in commands if is_command), key=len, default=[])
    except ValueError as error:
        raise input_error("--from-megatron-flags", f"{error}", "quote the whole command line") from None


def parse_flags(words: Iterable[str]) -> Flags:
    """Return the flags among ``words``. The last of equal flags counts. Words before the first flag are ignored."""
    return dict(_each_flag(words))


def _each_flag(words: Iterable[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), [value] if equals else []))
        elif re.match("-[A-Za-z]", word):
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
    return found


def as_overrides(words: Iterable[str]) -> list[str]:
    """Return the recipe overrides that mean the same as Megatron's flags among ``words``."""
    known = {name: given for name, given in parse_flags(words).items() if _knows(name)}
    return [f"{field}={_spell(value)}" for field, value in _settings(known, complete=False).items()]


def _knows(name: str) -> bool:
    return name in FIELDS or name in SWITCHES or name in VALUES


def _settings(flags: Flags, complete: bool = True) -> dict[str, Any]:
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
    flag = _flag(name, words)
    if _knows(name) and any("$" in word for word in words):
        raise input_error(flag, f"the shell has not expanded {' '.join(words)}", EXPAND)
    if name in SWITCHES:
        if words:
            raise input_error(
                flag, "Megatron-LM's flag takes no value", f"write {_flag(name, ())} alone, or leave it out"
            )
        return SWITCHES[name]
    try:
        if name in VALUES:
            return VALUES[name](words)
        if name in FIELDS and not _is_noted(name, words):
            return dict([parse_setting(f"{FIELDS[name]}={','.join(words) if words else 'true'}", flag)])
    except (LookupError, ValueError, InputError) as error:
        if not words:
            raise input_error(
                flag, "it has no value", "write the value after the flag, or leave the flag out"
            ) from None
        if isinstance(error, InputError):
            raise
        raise input_error(flag, "no recipe takes this value", "docs/recipes.md lists what recipes take") from None
    return {}


def _is_noted(name: str, words: Sequence[str]) -> bool:
    """Return whether no recipe has this value of a flag, so that a note must say what the cells do."""
    if name == "moe_layer_freq":
        return "[" in "".join(words)
    return name in NEEDED and bool(words) and words[0] not in ("constant", "cosine")


def _frequency(words: Sequence[str]) -> int:
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


def _is_number(words: Sequence[str]) -> bool:
    return bool(words) and words[0].isdecimal() and int(words[0]) > 0


def _number(flags: Flags, name: str, default: int = 0) -> int:
    """Return the positive number after a flag.

    Raises:
        InputError: the value is not a positive number, or the flag is missing and has no ``default``.
    """
    words = flags.get(name, [str(default)] if default else [])
    if _is_number(words) and len(words) == 1:
        return int(words[0])
    message = (
        "it is not a positive whole number" if name in flags else "it is missing, but other values are computed from it"
    )
    raise input_error(_flag(name, words), message, f"write for example {_flag(name, ['8'])}")


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
        raise input_error(_flag(name, flags[name]), f"a pipeline stage has {layers} layers", "write a divisor of that")
    return layers // each


def _spec(settings: Mapping[str, Any]) -> RunSpec:
    spec = RunSpec(engine="megatron", megatron_core=settings["megatron_core"])
    for section, cls in SECTIONS.items():
        names = {each.name for each in fields(cls)}
        own = {name: settings[f"{section}.{name}"] for name in names if f"{section}.{name}" in settings}
        changed = replace(getattr(spec, section), **own)
        if section == "cuda_graph":
            changed = replace(changed, **canonical_values({"impl": changed.impl, "scope": changed.scope}))
        spec = replace(spec, **{section: changed})
    return spec


def _name(flags: Flags, script: str) -> str:
    """Return the name of the model whose tokenizer is used, else the name of the script."""
    models = (word for word in flags.get("tokenizer_model", ()) if not word.endswith((".model", ".json")))
    names = (PurePosixPath(word).name.removesuffix(".py") for word in (*models, script))
    return next((name for name in names if NAME.fullmatch(name)), "from_megatron_flags")


def _recipe(name: str, spec: RunSpec, resources: Mapping[str, int]) -> str:
    """Return the YAML of ``spec``. It holds only what differs from a recipe's defaults."""
    plain, default = spec_to_json(spec), spec_to_json(RunSpec())
    tree: dict[str, Any] = {"name": name, "engine": "megatron"}
    tree |= {"megatron_core": spec.megatron_core} if spec.megatron_core != "0.16" else {}
    for section in ("model", "parallelism", "training", "data", "cuda_graph"):
        own = {
            name: value
            for name, value in plain[section].items()
            if value != default[section][name] or name == "num_layers"
        }
        tree |= {section: own} if own else {}
    return dump(tree | {"resources": {**resources, "device": "cuda"}})


def _notes_on_words(launcher: Flags, own: Iterable[str]) -> Iterator[str]:
    """Yield what the words of the command leave open.

    These are flags of the launcher that are missing or not numbers, and flags that are given twice.
    """
    for name, words in launcher.items():
        if name in NODES and not _is_number(words):
            yield f"{_flag(name, words[:1])} is not a number: set resources.{NODES[name]} in the recipe"
    if not launcher.keys() & NODES.keys():
        yield "the number of GPUs is not given: set resources.nodes and resources.gpus_per_node in the recipe"
    given = _each_flag(own)
    for name, count in Counter(name for name, _ in given).items():
        if count > 1:
            yield f"{_flag(name, ())} is given {count} times, and the last counts: {_flag(name, dict(given)[name])}"


def _notes(flags: Flags, spec: RunSpec) -> Iterator[str]:
    """Yield what the recipe does not express of ``flags``. Compare them with the flags of the recipe's export."""
    text, _ = megatron_lm.render(spec)
    exported = parse_flags(shlex.split(text.replace("\\\n", " ")))
    expressed = {FIELDS.get(name) for name in exported} | {"cuda_graph.scope"}
    silent = [name for name in flags if name not in exported and name not in SAID_ELSEWHERE | VALUES.keys()]
    unknown = [name for name in silent if FIELDS.get(name, "") not in expressed]
    for name in (name for name in flags if name in exported and name not in SAID_ELSEWHERE):
        if not _same(flags[name], exported[name]):
            yield f"{_flag(name, flags[name])}: the recipe's cells train with {_flag(name, exported[name])}"
    yield from _notes_on_missing(flags, exported, spec)
    if spec.training.steps > MANY_STEPS:
        yield (
            f"--train-iters {spec.training.steps}: every run takes as many, unless it exceeds resources.minutes_per_run;"
            " a verdict needs 100 steps after the capture: set training.steps=120"
        )
    if DROPS in flags and "moe_paged_stash" not in flags:
        yield f"--{DROPS.replace('_', '-')} without --moe-paged-stash: Megatron-Core 0.19.2 silently drops tokens above it"
    for name in unknown:
        if absent := absent_field(name):
            yield f"{_flag(name, flags[name])}: {': '.join(absent)}"
    if unknown := [name for name in unknown if not absent_field(name)]:
        yield f"without a counterpart in a recipe: {', '.join(_flag(name, flags[name]) for name in unknown)}"


def _notes_on_missing(flags: Flags, exported: Flags, spec: RunSpec) -> Iterator[str]:
    """Yield the values that follow from flags that are not given, where the recipe has others."""
    for name, default in NEEDED.items():
        if name not in flags and exported.get(name, [default]) != [default]:
            yield f"--{name.replace('_', '-')} is not given, so it is {default}; the recipe's is {' '.join(exported[name])}"
    if not {"swiglu", "quick_geglu"} & set(flags):
        yield "--swiglu is not given; the recipe's activation is swiglu"
    for field, (name, *others) in ASSUMED.items():
        if flags.keys().isdisjoint((name, *others)):
            section, _, key = field.partition(".")
            yield f"{_flag(name, ())} is not given; the recipe has {field}={getattr(getattr(spec, section), key)}"


def _same(given: Sequence[str], exported: Sequence[str]) -> bool:
    try:
        return [float(word) for word in given] == [float(word) for word in exported]
    except ValueError:
        return sorted(",".join(given).split(",")) == sorted(",".join(exported).split(","))


def _flag(name: str, words: Sequence[str]) -> str:
    return " ".join([name if name.startswith("-") else "--" + name.replace("_", "-"), *words])


def _spell(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
