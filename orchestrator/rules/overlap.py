"""What may run beside what: exchanges between ranks, and computations of other micro-batches."""

from __future__ import annotations

from launch.contract.spec import RunSpec
from orchestrator.rules.rule import CONFIG, MCORE, MCORE_016, MEGATRON, Rule, scope_text

BESIDE_EXPERTS = {"attn", "moe_router", "moe_preprocess"}
"""Scopes of transformer_engine that end before tokens are exchanged."""


def gathered_in_forward(spec: RunSpec) -> str | None:
    """overlap_param_gather goes with distributed_optimizer and overlap_grad_reduce."""
    layout = spec.parallelism
    if not layout.overlap_param_gather or (layout.distributed_optimizer and layout.overlap_grad_reduce):
        return None
    return (
        f"parallelism.overlap_param_gather=true with distributed_optimizer={str(layout.distributed_optimizer).lower()} "
        f"and overlap_grad_reduce={str(layout.overlap_grad_reduce).lower()}"
    )


def expert_exchange_unfit(spec: RunSpec) -> str | None:
    """overlap_moe_expert_parallel_comm needs ep above 1, dispatcher alltoall, bf16, no full recomputation, and interleaved
    stages where there are any."""
    layout, training = spec.parallelism, spec.training
    needs = {
        f"parallelism.ep={layout.ep}": layout.ep > 1,
        f"parallelism.dispatcher={layout.dispatcher}": layout.dispatcher == "alltoall",
        f"parallelism.pp={layout.pp}, vpp={layout.vpp}": layout.pp <= 1 or layout.vpp > 1,
        f"training.precision={training.precision}": training.precision == "bf16",
        f"training.recompute={training.recompute}": training.recompute != "full",
    }
    unmet = ", ".join(found for found, met in needs.items() if not met)
    if not layout.overlap_moe_expert_parallel_comm or not unmet:
        return None
    return f"parallelism.overlap_moe_expert_parallel_comm=true with {unmet}"


def expert_exchange_captured(spec: RunSpec) -> str | None:
    """With overlap_moe_expert_parallel_comm graphs are transformer_engine's, of attn, moe_router and moe_preprocess alone."""
    graph = spec.cuda_graph
    beside = graph.impl == "transformer_engine" and graph.scope and BESIDE_EXPERTS.issuperset(graph.scope)
    if not spec.parallelism.overlap_moe_expert_parallel_comm or not spec.graphed or beside:
        return None
    return f"parallelism.overlap_moe_expert_parallel_comm=true with {scope_text(spec)}"


def weight_gradients_delayed_alone(spec: RunSpec) -> str | None:
    """delay_wgrad_compute goes with overlap_moe_expert_parallel_comm."""
    layout = spec.parallelism
    if not layout.delay_wgrad_compute or layout.overlap_moe_expert_parallel_comm:
        return None
    return "parallelism.delay_wgrad_compute=true with overlap_moe_expert_parallel_comm=false"


def delayed_weight_gradients_captured(spec: RunSpec) -> str | None:
    """With delay_wgrad_compute no graph holds attention, nor a router with the shared expert beside it."""
    scope, shared = spec.cuda_graph.scope, spec.model.moe_shared_expert_ffn_hidden_size
    router = bool(shared) and "moe_router" in scope
    if not spec.parallelism.delay_wgrad_compute or not spec.graphed or not ("attn" in scope or router):
        return None
    beside = f", model.moe_shared_expert_ffn_hidden_size={shared}" if router else ""
    return f"parallelism.delay_wgrad_compute=true with {scope_text(spec)}{beside}"


RULES: tuple[Rule, ...] = (
    Rule(
        "overlap.param_gather", MEGATRON, MCORE_016, gathered_in_forward,
        remedy="Set parallelism.distributed_optimizer and overlap_grad_reduce to true, or overlap_param_gather to false.",
        source=f"{MCORE}distributed/param_and_grad_buffer.py:262; Megatron-LM core_v0.16.1 megatron/training/arguments.py "
        "(Must use --overlap-param-gather with --overlap-grad-reduce)",
    ),
    Rule(
        "overlap.expert_exchange", MEGATRON, MCORE_016, expert_exchange_unfit,
        remedy="Set ep to 2 or more, dispatcher to alltoall, vpp to 2 or more where pp is, precision to bf16, recompute to none "
        "or selective, whichever is named, or parallelism.overlap_moe_expert_parallel_comm to false.",
        source=f"{CONFIG}:1847",
    ),
    Rule(
        "overlap.expert_exchange_captured", MEGATRON, MCORE_016, expert_exchange_captured,
        remedy="Use transformer_engine with [attn, moe_router, moe_preprocess] or some of them, or set "
        "parallelism.overlap_moe_expert_parallel_comm to false.",
        source=f"{CONFIG}:1898; {MCORE}transformer/transformer_layer.py:1041 (whole layers)",
    ),
    Rule(
        "overlap.delayed_wgrad", MEGATRON, MCORE_016, weight_gradients_delayed_alone,
        remedy="Set parallelism.overlap_moe_expert_parallel_comm to true, or delay_wgrad_compute to false.",
        source=f"{CONFIG}:1910",
    ),
    Rule(
        "overlap.delayed_wgrad_captured", MEGATRON, MCORE_016, delayed_weight_gradients_captured,
        remedy="Capture moe_router and moe_preprocess alone, or nothing where there is a shared expert, or set "
        "parallelism.delay_wgrad_compute to false.",
        source="Megatron-LM pull request 3074, megatron/training/arguments.py: it takes transformer-engine 2.12, which "
        "megatron-core 0.16 does not allow, and gradient_accumulation_fusion",
    ),
)  # fmt: skip
