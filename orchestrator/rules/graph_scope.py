"""Rules on which implementation and scope fit each other, and fit the engine and the model."""

from __future__ import annotations

from launch.contract.graph_impls import GRAPH_IMPLS, GRAPH_SCOPES, MOE_SCOPES
from launch.contract.spec import EngineName, RunSpec
from launch.support.rule import ALL_ENGINES, CONFIG, GRAPH, MCORE, MegatronRule, Rule

SCOPED = ", ".join(name for name, row in GRAPH_IMPLS.items() if row.takes_scope)


def _names_on(engine: EngineName) -> str:
    *names, last = (name for name, row in GRAPH_IMPLS.items() if engine in row.engines and name != "none")
    return f"{', '.join(names)} and {last}"


def _moe_scope_without_experts(spec: RunSpec) -> bool:
    # Megatron-Core counts a single expert as no experts.
    least = 2 if spec.engine == "megatron" else 1
    return spec.model.num_moe_experts < least and any(name in MOE_SCOPES for name in spec.cuda_graph.scope)


def _captures_whole_layers(spec: RunSpec) -> bool:
    """Return whether a non-empty scope selects layers that are captured whole."""
    implementation = spec.cuda_graph.implementation
    return implementation.takes_scope and not implementation.splits_layers and bool(spec.cuda_graph.scope)


RULES: tuple[Rule, ...] = (
    Rule(
        "scope.impl_engine", ("engine", "cuda_graph.impl"),
        f"torch_native has {_names_on('torch_native')}, and megatron has {_names_on('megatron')}",
        lambda spec: spec.engine not in spec.cuda_graph.implementation.engines,
        fix="Set cuda_graph.impl=transformer_engine, or cuda_graph.impl=torch, or cuda_graph.impl=full_iteration and "
        "cuda_graph.scope=[], or engine=torch_native, or engine=megatron.",
        source=f"{CONFIG}:1717",
    ),
    Rule(
        "scope.unknown", ("cuda_graph.scope",), f"each scope must be one of {', '.join(GRAPH_SCOPES)}",
        lambda spec: not set(spec.cuda_graph.scope) <= set(GRAPH_SCOPES),
        fix="Name some of these, or [] for the whole layer. The whole step is an implementation, not a scope: set "
        "cuda_graph.impl=full_iteration and cuda_graph.scope=[].",
        source=f"{CONFIG}:1711; {MCORE}transformer/enums.py:70",
        engines=ALL_ENGINES,
    ),
    Rule(
        "scope.not_taken", GRAPH, f"only {SCOPED} take a scope",
        lambda spec: bool(spec.cuda_graph.scope) and not spec.cuda_graph.implementation.takes_scope,
        fix="Set cuda_graph.scope=[], or cuda_graph.impl=transformer_engine, or cuda_graph.impl=torch.",
        source=f"{CONFIG}:1738; {MCORE}pipeline_parallel/schedules.py:693 (scopes with full_iteration)",
        engines=ALL_ENGINES,
    ),
    Rule(
        "scope.optimizer", ("cuda_graph.optimizer", "engine", "cuda_graph.impl"),
        "only full_iteration captures the optimizer",
        lambda spec: spec.cuda_graph.optimizer and spec.engine not in spec.cuda_graph.implementation.optimizer_engines,
        fix="Set cuda_graph.optimizer=false, or cuda_graph.impl=full_iteration and cuda_graph.scope=[].",
        source="launch/contract/graph_impls.py",
    ),
    Rule(
        "scope.duplicate", ("cuda_graph.scope",), "each scope must be named once",
        lambda spec: len(set(spec.cuda_graph.scope)) < len(spec.cuda_graph.scope),
        fix="Name each scope once.",
        source="one configuration has one name: a repeated scope would give the same run a second id",
        engines=ALL_ENGINES,
    ),
    Rule(
        "scope.moe_and_router", ("cuda_graph.scope",),
        "moe (router, dispatch and experts) contains moe_router, so they exclude each other",
        lambda spec: {"moe", "moe_router"} <= set(spec.cuda_graph.scope),
        fix="Set cuda_graph.scope=[attn, moe_router, moe_preprocess], or cuda_graph.scope=[moe_router, moe_preprocess], or "
        "cuda_graph.scope=[attn, moe], or cuda_graph.scope=[moe].",
        source=f"{CONFIG}:1743",
        engines=ALL_ENGINES,
    ),
    Rule(
        "scope.preprocess_without_router", ("cuda_graph.scope",), "moe_preprocess continues the graph of moe_router and needs it",
        lambda spec: "moe_preprocess" in spec.cuda_graph.scope and "moe_router" not in spec.cuda_graph.scope,
        fix="Set cuda_graph.scope=[moe_router, moe_preprocess], or cuda_graph.scope=[attn, moe_router, moe_preprocess], or "
        "cuda_graph.scope=[attn].",
        source=f"{CONFIG}:1747 (local adds moe_router on its own, :1725: name what would run)",
        engines=ALL_ENGINES,
    ),
    Rule(
        "scope.moe_on_dense", ("cuda_graph.scope", "model.num_moe_experts"),
        f"{', '.join(MOE_SCOPES)} need a mixture-of-experts model, and in megatron more than one expert",
        _moe_scope_without_experts,
        fix="Set cuda_graph.scope=[attn], or cuda_graph.scope=[mlp], or cuda_graph.scope=[].",
        source=f"{CONFIG}:1751",
    ),
    Rule(
        "scope.mlp_without_dense_layers", ("cuda_graph.scope", "model.num_moe_experts", "model.moe_layer_freq"),
        "mlp needs at least one dense layer",
        lambda spec: "mlp" in spec.cuda_graph.scope and not spec.model.has_dense_layers,
        fix="Set cuda_graph.scope=[attn], or cuda_graph.scope=[moe_router, moe_preprocess], or "
        "cuda_graph.scope=[attn, moe_router, moe_preprocess], or cuda_graph.scope=[attn, mamba], or cuda_graph.scope=[mamba].",
        source=f"{CONFIG}:1756",
    ),
    Rule(
        "scope.mamba", ("cuda_graph.scope", "model.hybrid_override_pattern"), "mamba needs mamba layers",
        lambda spec: "mamba" in spec.cuda_graph.scope and "mamba" not in spec.model.layer_scopes,
        fix="Set cuda_graph.scope=[attn], or cuda_graph.scope=[], or write a model.hybrid_override_pattern with an M for each such "
        "layer.",
        source=f"{MCORE}transformer/cuda_graphs.py:1645 (matches no layer: nothing would be captured)",
    ),
    Rule(
        "scope.attn_without_attention", ("cuda_graph.scope", "model.hybrid_override_pattern"),
        "attn needs layers with attention",
        lambda spec: "attn" in spec.cuda_graph.scope and "attn" not in spec.model.layer_scopes,
        fix="Set cuda_graph.scope=[mamba], or cuda_graph.scope=[].",
        source=f"{MCORE}transformer/cuda_graphs.py:1649 (matches no layer: nothing would be captured)",
    ),
    MegatronRule(
        "scope.local_mlp", (*GRAPH, "model.hybrid_override_pattern"),
        "local with mlp cannot build a layer that lacks attention, or whose attention is not in the scope",
        lambda spec: _captures_whole_layers(spec)
        and "mlp" in spec.cuda_graph.scope
        and ("attn" not in spec.cuda_graph.scope or spec.model.is_hybrid),
        fix="Set cuda_graph.scope=[attn, mlp], or cuda_graph.scope=[], or cuda_graph.impl=transformer_engine.",
        source=f"{MCORE}transformer/transformer_layer.py:485 (it asks whether the layer has experts before it knows)",
    ),
    MegatronRule(
        "scope.local_nothing", GRAPH, "local captures a GPT layer for attn, mlp or the empty scope, and nothing for other scopes",
        lambda spec: _captures_whole_layers(spec) and not spec.captured_parts,
        fix="Set cuda_graph.scope=[attn], or cuda_graph.scope=[], or cuda_graph.impl=transformer_engine.",
        source=f"{MCORE}transformer/transformer_layer.py:472-486; only Mamba's specs build the layer that knows these "
        "scopes (models/mamba/mamba_layer_specs.py:85)",
    ),
)  # fmt: skip
