"""Settings of Megatron, Transformer Engine and PyTorch that no engine here has: why, and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

OWN_PROGRAM = "run your own program with it by engine: command (docs/your_own_job.md)"
MLA, MTP, FLEX = "multi-latent attention", "multi-token prediction", "the flex dispatcher (DeepEP, HybridEP)"

_OF_OTHERS: Mapping[str, str] = {
    r"multi_latent_attention|mla_\w+|cache_mla_latents|(q|kv)_lora_rank|qk_head_dim|qk_pos_emb_head_dim|v_head_dim": MLA,
    r"mtp_\w+": MTP,
    r"moe_flex_dispatcher_\w+|moe_enable_deepep|moe_(deepep|hybridep)_\w+|moe_permute_fusion_into_hybridep": FLEX,
}
_WITHOUT_NEED: Mapping[str, tuple[str, str]] = {
    r"(enable_)?autocast\w*|amp|cache_enabled": (
        "no engine here autocasts: a model computes in the precision of its weights",
        f"write training.precision: bf16, or {OWN_PROGRAM}",
    ),
    r"use_precision_aware_optimizer|store_param_remainders|(exp_avg|exp_avg_sq|main_params|main_grads)_dtype": (
        "a recipe names the precision of the whole optimizer",
        "write training.optimizer_precision: lean, or fp32",
    ),
    r"num_warmup_iters": (
        "no engine here has PyTorch's DDP, whose buckets take 11 passes to settle; graphs are warmed up by whole steps",
        f"write cuda_graph.warmup_steps: 3, or {OWN_PROGRAM}",
    ),
    r"cuda_graph_share_io_buffers|share_io_buffers": (
        "Megatron-Core 0.16 and 0.19 have no such field: local graphs share buffers by themselves",
        "leave it out",
    ),
    r"cuda_graph_use_single_mempool|use_single_mempool": (
        "0.16 never reads it, and in 0.19 it joins the graph pools of training, validation and optimizer, which engine "
        "megatron keeps apart",
        "leave it out",
    ),
}


def absent_field(name: str) -> tuple[str, str] | None:
    """Return why no engine here has the field, and the fix. Return None if the field is unknown."""
    for pattern, what in _OF_OTHERS.items():
        if re.fullmatch(pattern, name):
            return _of_own_programs(what)
    return next((said for pattern, said in _WITHOUT_NEED.items() if re.fullmatch(pattern, name)), None)


def absent_value(field: str, value: object) -> tuple[str, str] | None:
    """Return why no engine here has this value of a field, and the fix. Return None if the value is unknown."""
    return _of_own_programs(FLEX) if (field, value) == ("dispatcher", "flex") else None


def _of_own_programs(what: str) -> tuple[str, str]:
    return f"no engine here has {what}", OWN_PROGRAM
