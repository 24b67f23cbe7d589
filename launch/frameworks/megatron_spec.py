"""Read Megatron's settings from the words of a user's command, as a spec of engine megatron. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launch.common.flag_difference import read_flags
from launch.contract.graph_impls import GRAPH_IMPLS, GRAPH_SCOPES
from launch.contract.spec import SECTIONS, CudaGraph, RunSpec
from launch.frameworks.command_line import command_words
from launch.megatron_config.field_names import DEPRECATED, FIELDS

_OF_MEGATRON = ("megatron_lm", "megatron_bridge")


def megatron_spec(spec: RunSpec) -> RunSpec | None:
    """Return the settings that the command of ``spec`` names, and defaults of Megatron for the rest; None for another trainer.

    Flags (``--cuda-graph-impl local``) and overrides (``model.cuda_graph_impl=local``) count alike. Words that cannot be read
    count as missing.
    """
    written = read_flags(command_words(spec, {})).items()
    flags = {name.lstrip("-").rpartition(".")[2].replace("-", "_"): value for name, value in written}
    if spec.command.framework not in _OF_MEGATRON and flags.keys().isdisjoint({"cuda_graph_impl", *DEPRECATED}):
        return None
    sections = _sections(flags)
    graph = (
        spec.cuda_graph if spec.cuda_graph.impl not in ("none", "command") else _graph(flags, sections["cuda_graph"])
    )
    named = {name: replace(getattr(spec, name), **sections[name]) for name in ("model", "parallelism", "training")}
    layout, training = named["parallelism"], named["training"]
    micro_batch = max(1, training.micro_batch_size)
    ranks = spec.parallelism.world_size // max(1, layout.tp * layout.cp * layout.pp)
    etp = layout.etp if "expert_tensor_parallel_size" in flags else layout.tp
    named["parallelism"] = layout = replace(layout, dp=max(1, ranks), etp=etp)
    batch = {
        "micro_batch_size": micro_batch,
        "global_batch_size": training.global_batch_size or micro_batch * layout.dp,
    }
    named["training"] = replace(training, **batch, **_numerics(spec, flags))
    # Biases matter to a known fault alone: that of a router whose output has more precision than its bias.
    biased = "disable_bias_linear" not in flags and flags.get("moe_router_dtype") == "fp32"
    named["model"] = replace(named["model"], rope_scaling=_rope_scaling(flags), add_bias_linear=biased)
    return replace(spec, engine="megatron", cuda_graph=graph, **named)


def _sections(flags: Mapping[str, str]) -> Mapping[str, dict[str, Any]]:
    """Return the fields that ``flags`` name, by section. Their values have the types of the defaults."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, text in flags.items():
        section, _, key = FIELDS.get(name, "").partition(".")
        default = getattr(SECTIONS[section](), key) if key else None
        if default is not None and (value := _convert(default, text)) is not None:
            found[section][key] = value
    return found


def _convert(default: Any, text: str) -> Any:
    """Return ``text`` as a value of the type of ``default``; None if it is not such a value."""
    if isinstance(default, bool):
        return text.lower() in ("", "true", "1")
    if isinstance(default, tuple):
        return tuple(re.findall(r"\w+", text))
    try:
        return type(default)(text)
    except ValueError:
        return None


def _graph(flags: Mapping[str, str], named: Mapping[str, Any]) -> CudaGraph:
    impl: Any = next((value for switch, (_, value) in DEPRECATED.items() if switch in flags), named.get("impl", "none"))
    scope = named.get("scope", ())
    if "full_iteration" in scope or impl not in GRAPH_IMPLS:
        return CudaGraph("full_iteration" if "full_iteration" in scope else "none")
    return CudaGraph(impl, tuple(name for name in GRAPH_SCOPES if name in scope))


def _numerics(spec: RunSpec, flags: Mapping[str, str]) -> dict[str, Any]:
    """Return the precision, and whether gradients are fused. Recipes of Megatron Bridge decide where no word does."""
    bridge = spec.command.framework == "megatron_bridge"
    fused = "no_gradient_accumulation_fusion" not in flags and not bridge
    return {
        "precision": "bf16" if bridge or {"bf16", "fp16"} & flags.keys() else "fp32",
        "fp8": "delayed" if {"fp8", "fp8_format"} & flags.keys() else "none",
        "gradient_accumulation_fusion": fused or flags.get("gradient_accumulation_fusion", "").lower() == "true",
    }


def _rope_scaling(flags: Mapping[str, str]) -> str:
    return "yarn" if flags.get("position_embedding_type") == "yarn" else "none"
