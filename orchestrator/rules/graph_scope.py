"""Which implementation and scope belong together, and to which engine and model."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable

from launch.contract.graph_impls import GRAPH_IMPLS, GRAPH_SCOPES, MOE_SCOPES
from launch.contract.spec import RunSpec
from orchestrator.rules.rule import ANY, BOTH, CONFIG, MCORE, MCORE_016, MEGATRON, Rule, scope_text


def unknown_impl(spec: RunSpec) -> str | None:
    """The implementation is a known one."""
    if spec.cuda_graph.impl in GRAPH_IMPLS:
        return None
    return f"cuda_graph.impl={spec.cuda_graph.impl} is not known{_did_you_mean([spec.cuda_graph.impl], GRAPH_IMPLS)}"


def impl_of_other_engine(spec: RunSpec) -> str | None:
    """The engine has the implementation: torch_compile and torch are torch_native's, local is megatron's."""
    if spec.engine in spec.cuda_graph.implementation.engines or spec.cuda_graph.impl not in GRAPH_IMPLS:
        return None
    return f"engine={spec.engine} has no cuda_graph.impl={spec.cuda_graph.impl}"


def unknown_scope(spec: RunSpec) -> str | None:
    """Every scope is a known part of a layer."""
    unknown = [name for name in spec.cuda_graph.scope if name not in GRAPH_SCOPES]
    if not unknown:
        return None
    return f"cuda_graph.scope holds {', '.join(unknown)}{_did_you_mean(unknown, GRAPH_SCOPES)}"


def scope_not_taken(spec: RunSpec) -> str | None:
    """Only torch, transformer_engine and local take a scope."""
    if not spec.cuda_graph.scope or spec.cuda_graph.implementation.takes_scope:
        return None
    return f"{scope_text(spec)}: {spec.cuda_graph.impl} takes no scope"


def optimizer_not_captured(spec: RunSpec) -> str | None:
    """Only torch_native's full_iteration captures the optimizer."""
    if not spec.cuda_graph.optimizer or spec.engine in spec.cuda_graph.implementation.optimizer_engines:
        return None
    return f"cuda_graph.optimizer=true with engine={spec.engine}, cuda_graph.impl={spec.cuda_graph.impl}"


def duplicate_scope(spec: RunSpec) -> str | None:
    """No scope is named twice."""
    twice = [name for name, count in Counter(spec.cuda_graph.scope).items() if count > 1]
    return f"{scope_text(spec)} names {', '.join(twice)} more than once" if twice else None


def moe_with_router(spec: RunSpec) -> str | None:
    """moe (router, dispatch and experts) and moe_router (its first part) exclude each other."""
    scope = spec.cuda_graph.scope
    return f"{scope_text(spec)} holds both moe and moe_router" if {"moe", "moe_router"} <= set(scope) else None


def preprocess_without_router(spec: RunSpec) -> str | None:
    """moe_preprocess continues the graph of moe_router and needs it."""
    scope = spec.cuda_graph.scope
    if "moe_preprocess" not in scope or "moe_router" in scope:
        return None
    return f"{scope_text(spec)} holds moe_preprocess without moe_router"


def moe_scope_on_dense(spec: RunSpec) -> str | None:
    """moe, moe_router and moe_preprocess need a mixture-of-experts model, and in megatron more than one expert."""
    named = [name for name in MOE_SCOPES if name in spec.cuda_graph.scope]
    if not named or spec.model.num_moe_experts > (1 if spec.engine == "megatron" else 0):
        return None
    return f"cuda_graph.scope holds {', '.join(named)}, but model.num_moe_experts={spec.model.num_moe_experts}"


def mlp_without_dense_layers(spec: RunSpec) -> str | None:
    """mlp needs at least one dense layer."""
    if "mlp" not in spec.cuda_graph.scope or spec.model.has_dense_layers:
        return None
    return (
        f"cuda_graph.scope holds mlp, but all layers are mixtures of experts (model.num_moe_experts="
        f"{spec.model.num_moe_experts}, model.moe_layer_freq={spec.model.moe_layer_freq})"
    )


def mamba_without_mamba_layers(spec: RunSpec) -> str | None:
    """mamba needs mamba layers, which no model described here has."""
    if "mamba" not in spec.cuda_graph.scope:
        return None
    return f"{scope_text(spec)} holds mamba, but the model has no mamba layers"


def local_mlp_meets_moe_layer(spec: RunSpec) -> str | None:
    """local with mlp and without attn needs a model without mixture-of-experts layers."""
    graph = spec.cuda_graph
    if graph.impl != "local" or "mlp" not in graph.scope or "attn" in graph.scope or not spec.model.is_moe:
        return None
    return f"{scope_text(spec)} meets mixture-of-experts layers (model.num_moe_experts={spec.model.num_moe_experts})"


def local_captures_nothing(spec: RunSpec) -> str | None:
    """local hangs a GPT layer's graph on attn, mlp or the empty scope; other scopes alone capture nothing."""
    graph = spec.cuda_graph
    if graph.impl != "local" or not graph.scope or {"attn", "mlp"} & set(graph.scope):
        return None
    return f"{scope_text(spec)} captures nothing of a GPT layer"


def _did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    candidates = list(known)
    close = [match for name in unknown for match in difflib.get_close_matches(name, candidates, n=1)]
    return f" (did you mean {', '.join(close)}?)" if close else ""


RULES: tuple[Rule, ...] = (
    Rule(
        "scope.impl_unknown", BOTH, ANY, unknown_impl,
        remedy=f"Use one of {', '.join(GRAPH_IMPLS)}.",
        source=f"{CONFIG}:1717; launch/contract/graph_impls.py",
    ),
    Rule(
        "scope.impl_engine", BOTH, ANY, impl_of_other_engine,
        remedy="Change the engine, or use torch_compile, torch, transformer_engine or full_iteration on torch_native "
        "and transformer_engine or full_iteration on megatron.",
        source=f"{CONFIG}:1717",
    ),
    Rule(
        "scope.unknown", BOTH, ANY, unknown_scope,
        remedy=f"Use {', '.join(GRAPH_SCOPES)}, or [] for the whole layer; the whole step is not a scope but an "
        "implementation, cuda_graph.impl: full_iteration.",
        source=f"{CONFIG}:1711; {MCORE}transformer/enums.py:70",
    ),
    Rule(
        "scope.not_taken", BOTH, ANY, scope_not_taken,
        remedy="Leave cuda_graph.scope out, or use transformer_engine, or torch on torch_native.",
        source=f"{CONFIG}:1738; {MCORE}pipeline_parallel/schedules.py:693 (scopes beside full_iteration)",
    ),
    Rule(
        "scope.optimizer", BOTH, ANY, optimizer_not_captured,
        remedy="Set cuda_graph.optimizer to false, or use full_iteration with engine torch_native.",
        source=f"{MCORE}full_cuda_graph.py:94 (captures forward and backward; the optimizer runs after it)",
    ),
    Rule(
        "scope.duplicate", BOTH, ANY, duplicate_scope,
        remedy="Name each scope once.",
        source="one configuration, one name: a repeated scope would give the same run another id",
    ),
    Rule(
        "scope.moe_and_router", BOTH, ANY, moe_with_router,
        remedy="Keep moe, or moe_router (with moe_preprocess for more).",
        source=f"{CONFIG}:1743",
    ),
    Rule(
        "scope.preprocess_without_router", BOTH, ANY, preprocess_without_router,
        remedy="Add moe_router to cuda_graph.scope, or take moe_preprocess out.",
        source=f"{CONFIG}:1747 (local adds moe_router by itself, :1725: name what would run)",
    ),
    Rule(
        "scope.moe_on_dense", BOTH, ANY, moe_scope_on_dense,
        remedy="Use attn, mlp or [] on a dense model; take them out where megatron has one expert.",
        source=f"{CONFIG}:1751",
    ),
    Rule(
        "scope.mlp_without_dense_layers", BOTH, ANY, mlp_without_dense_layers,
        remedy="Take mlp out; for mixture-of-experts layers use moe_router with moe_preprocess, or moe.",
        source=f"{CONFIG}:1756",
    ),
    Rule(
        "scope.mamba", BOTH, ANY, mamba_without_mamba_layers,
        remedy="Take mamba out of cuda_graph.scope.",
        source=f"{MCORE}transformer/cuda_graphs.py:1645 (matches no layer: nothing would be captured)",
    ),
    Rule(
        "scope.local_mlp", MEGATRON, MCORE_016, local_mlp_meets_moe_layer,
        remedy="Use transformer_engine for mlp in a model with both kinds of layer.",
        source=f"{MCORE}transformer/transformer_layer.py:485 (a bare assertion)",
    ),
    Rule(
        "scope.local_nothing", MEGATRON, MCORE_016, local_captures_nothing,
        remedy="Use transformer_engine for router and expert scopes.",
        source=f"{MCORE}transformer/transformer_layer.py:472-486; only Mamba's specs build the layer that knows these "
        "scopes (models/mamba/mamba_layer_specs.py:85)",
    ),
)  # fmt: skip
