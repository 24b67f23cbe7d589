"""Settings of Megatron, Transformer Engine and PyTorch that no engine here has: why, and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launch.megatron_config.field_names import FIELDS

OWN_PROGRAM = "run your own program with it by engine: command (docs/your_own_job.md)"
MLA, MTP, FLEX = "multi-latent attention", "multi-token prediction", "the flex dispatcher (DeepEP, HybridEP)"
_LEAVE_OUT = "leave it out"

_OF_OTHERS: Mapping[str, str] = {
    r"multi_latent_attention|mla_\w+|cache_mla_latents|(q|kv)_lora_rank|qk_head_dim|qk_pos_emb_head_dim|v_head_dim": MLA,
    r"mtp_\w+": MTP,
    r"moe_flex_dispatcher_\w+|moe_enable_deepep|moe_(deepep|hybridep)_\w+|moe_permute_fusion_into_hybridep": FLEX,
    r"moe_paged_stash\w*|moe_expert_rank_capacity_factor": f"the paged stash, which needs {FLEX}",
    r"(peft|lora)(_\w+)?": "LoRA: engines train all parameters",
    r"(\w+_)?vision_\w+": "images",
    r"fp16|fp16_\w+|(initial|min)_loss_scale|loss_scale(_window)?": "fp16, which needs loss scaling",
    r"inference_\w+|cudagraph_inference\w*|flash_decode": "inference",
    r"fp4\w*|\w*nvfp4\w*": "FP4, which needs Blackwell",
    r"cpu_offloading_\w+|fine_grained_(activation_)?offloading\w*|offload_modules|optimizer_(cpu_)?offload\w*": "offloading",
    r"variable_seq_lengths": "sequences of different lengths in a batch",
    r"rampup_batch_size|decrease_batch_size_\w+": "a batch that changes during a run",
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
    r"bf16": ("a recipe names the precision by one field", "write training.precision: bf16, or fp32"),
    r"fp8_(recipe|format)": (
        "a recipe names fp8 by its scaling, delayed or current (tensorwise), and the format is always hybrid",
        f"write training.fp8: delayed, or current; for other scalings and formats {OWN_PROGRAM}",
    ),
    r"recompute_(method|num_layers)": (
        "full recomputation here keeps the input of each layer (uniform, one layer)",
        "write training.recompute: full",
    ),
    r"num_warmup_iters": (
        "no engine here has PyTorch's DDP, whose buckets take 11 passes to settle; graphs are warmed up by whole steps",
        f"write cuda_graph.warmup_steps: 3, or {OWN_PROGRAM}",
    ),
    r"check_for_nan_in_(loss|grad|loss_and_grad)": (
        "engines check the loss and the gradient norm of each step outside of its graph",
        _LEAVE_OUT,
    ),
    r"(use_)?te_rng_tracker|use_cudagraphable_rng": (
        "engine megatron always has Transformer Engine's tracker of random states, in eager baselines too",
        _LEAVE_OUT,
    ),
    r"cuda_graph_share_io_buffers|share_io_buffers": (
        "Megatron-Core 0.16 and 0.19 have no such field: local graphs share buffers by themselves",
        _LEAVE_OUT,
    ),
    r"cuda_graph_use_single_mempool|use_single_mempool": (
        "0.16 never reads it, and in 0.19 it joins the graph pools of training, validation and optimizer, which engine "
        "megatron keeps apart",
        _LEAVE_OUT,
    ),
    r"(cuda_graph_)?retain_backward_graph": ("engines run each captured backward pass once", _LEAVE_OUT),
    r"(cuda_graph_)?(granularity|dynamic_microbatches|num_microbatch_slots)": (
        "Megatron-Core 0.16 and 0.19 have no such field",
        f"{_LEAVE_OUT}, or {OWN_PROGRAM}",
    ),
}
_FP8_VALUES = ("hybrid", "e4m3", "tensorwise", "blockwise", "mxfp8")
"""Megatron's formats and scalings that a recipe does not name."""


def absent_field(name: str) -> tuple[str, str] | None:
    """Return why no engine here has the field, and the fix. Return None if the field is unknown."""
    for pattern, what in _OF_OTHERS.items():
        if re.fullmatch(pattern, name):
            return f"no engine here has {what}", f"{OWN_PROGRAM}, or {_LEAVE_OUT}"
    return next((said for pattern, said in _WITHOUT_NEED.items() if re.fullmatch(pattern, name)), None)


def absent_value(field: str, value: object) -> tuple[str, str] | None:
    """Return why no engine here has this value of a field, by our name or Megatron's. Return None if the value is unknown."""
    known = FIELDS.get(field, field).rpartition(".")[2]
    if (known, value) == ("dispatcher", "flex"):
        return f"no engine here has {FLEX}", OWN_PROGRAM
    if known == "fp8" and value in _FP8_VALUES:
        return _WITHOUT_NEED[r"fp8_(recipe|format)"]
    return None
