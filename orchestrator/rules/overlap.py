"""Rules on what may overlap: communication between ranks, and computation of other micro-batches."""

from __future__ import annotations

from launch.contract.spec import RunSpec
from launch.support.rule import CONFIG, GRAPH, MCORE, MegatronRule, Rule

BEFORE_EXCHANGE = {"attn", "moe_router", "moe_preprocess"}
"""Scopes of transformer_engine that end before tokens are exchanged."""
EXPERT_OVERLAP = "parallelism.overlap_moe_expert_parallel_comm"


def _unmet_needs(spec: RunSpec) -> list[str]:
    layout, training = spec.parallelism, spec.training
    unmet = {
        "parallelism.ep": layout.ep <= 1,
        "parallelism.dispatcher": layout.dispatcher != "alltoall",
        "parallelism.vpp": layout.pp > 1 and layout.vpp <= 1,
        "training.precision": training.precision != "bf16",
        "training.recompute": training.recompute == "full",
        "training.recompute_modules": "moe" in training.recomputed,
    }
    fields = [field for field, is_unmet in unmet.items() if is_unmet]
    return [EXPERT_OVERLAP, *fields] if layout.overlap_moe_expert_parallel_comm and fields else []


def _captured_across_exchange(spec: RunSpec) -> bool:
    graph = spec.cuda_graph
    apart = graph.impl == "transformer_engine" and graph.scope and BEFORE_EXCHANGE.issuperset(graph.scope)
    return spec.parallelism.overlap_moe_expert_parallel_comm and spec.graphed and not apart


def _captured_delayed_gradients(spec: RunSpec) -> list[str]:
    if not spec.parallelism.delay_wgrad_compute or not spec.graphed:
        return []
    shared = bool(spec.model.moe_shared_expert_ffn_hidden_size) and "moe_router" in spec.cuda_graph.scope
    if not shared and "attn" not in spec.cuda_graph.scope:
        return []
    return ["parallelism.delay_wgrad_compute", *GRAPH, *(["model.moe_shared_expert_ffn_hidden_size"] if shared else [])]


RULES: tuple[Rule, ...] = (
    MegatronRule(
        "overlap.param_gather",
        ("parallelism.overlap_param_gather", "parallelism.distributed_optimizer", "parallelism.overlap_grad_reduce"),
        "overlap_param_gather needs distributed_optimizer and overlap_grad_reduce",
        lambda spec: spec.parallelism.overlap_param_gather
        and not (spec.parallelism.distributed_optimizer and spec.parallelism.overlap_grad_reduce),
        fix="Set parallelism.overlap_param_gather=false, or parallelism.distributed_optimizer=true and "
        "parallelism.overlap_grad_reduce=true.",
        source=f"{MCORE}distributed/param_and_grad_buffer.py:262; Megatron-LM core_v0.16.1 megatron/training/arguments.py "
        "(Must use --overlap-param-gather with --overlap-grad-reduce)",
    ),
    MegatronRule(
        "overlap.expert_exchange", (),
        "the overlap needs ep above 1, dispatcher alltoall and bf16, excludes recomputation of all or of moe, and needs "
        "interleaved stages if pp is above 1",
        _unmet_needs,
        fix=f"Set {EXPERT_OVERLAP}=false, or change the named fields: ep to 2 or more, dispatcher to alltoall, vpp to 2 or more with "
        "schedule interleaved, precision to bf16, recompute to none or selective, recompute_modules without moe.",
        source=f"{CONFIG}:1847; megatron-core 0.19.2 transformer/transformer_config.py:2698 (moe; without effect in 0.16)",
    ),
    MegatronRule(
        "overlap.expert_exchange_captured", (EXPERT_OVERLAP, *GRAPH),
        "only transformer_engine's graphs of attn, moe_router and moe_preprocess end before the exchange of tokens",
        _captured_across_exchange,
        fix="Set cuda_graph.impl=transformer_engine and cuda_graph.scope=[attn, moe_router, moe_preprocess], or "
        "cuda_graph.impl=transformer_engine and cuda_graph.scope=[moe_router, moe_preprocess], or "
        f"{EXPERT_OVERLAP}=false.",
        source=f"{CONFIG}:1898; {MCORE}transformer/transformer_layer.py:1041 (whole layers)",
    ),
    MegatronRule(
        "overlap.delayed_wgrad", ("parallelism.delay_wgrad_compute", EXPERT_OVERLAP),
        "delay_wgrad_compute needs overlap_moe_expert_parallel_comm",
        lambda spec: spec.parallelism.delay_wgrad_compute and not spec.parallelism.overlap_moe_expert_parallel_comm,
        fix=f"Set parallelism.delay_wgrad_compute=false, or {EXPERT_OVERLAP}=true.",
        source=f"{CONFIG}:1910",
    ),
    MegatronRule(
        "overlap.delayed_wgrad_captured", (),
        "with delay_wgrad_compute, no graph may contain attention, nor a router if the model has a shared expert",
        _captured_delayed_gradients,
        fix="Set cuda_graph.scope=[moe_router, moe_preprocess], or parallelism.delay_wgrad_compute=false.",
        source="Megatron-LM pull request 3074, megatron/training/arguments.py. It needs gradient_accumulation_fusion, and "
        "transformer-engine 2.12, which megatron-core 0.16 does not allow",
    ),
)  # fmt: skip
