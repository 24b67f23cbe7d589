"""What engine torch_native takes."""

from __future__ import annotations

from launch.contract.spec import RunSpec
from launch.support.support_rule import SupportRule, fixed, is_plain

OF_MEGATRON = "set it to false, or engine=megatron"


def _grouped_mm_width(width: int, spec: RunSpec) -> bool:
    """CUDA's grouped_mm wants rows of whole 16 bytes: 8 elements of bfloat16. float32 is multiplied expert by expert."""
    in_groups = spec.model.is_moe and spec.training.precision == "bf16" and spec.placement.device == "cuda"
    return not in_groups or width % 8 == 0


def _expresses(backend: str, spec: RunSpec) -> bool:
    """Whether an attention backend expresses the model's layers on this device; auto chooses one that does. Transformer
    Engine keeps Dynamo out of its own (2.11 pytorch/attention/dot_product_attention/dot_product_attention.py:798)."""
    plain = is_plain(spec.model) and not spec.data.packed_sequences
    on_cuda = spec.placement.device == "cuda"
    if backend == "transformer_engine":
        beyond = spec.data.packed_sequences or spec.compiles_whole
        return on_cuda and spec.training.precision == "bf16" and not beyond
    return backend == "auto" or (plain if backend == "sdpa" else on_cuda)


def _lies_whole(spec: RunSpec) -> bool:
    """Whether each rank holds the whole model."""
    return (spec.parallelism.tp, spec.parallelism.pp, spec.parallelism.ep) == (1, 1, 1)


TORCH_NATIVE: tuple[SupportRule, ...] = (
    SupportRule("model.kv_channels", lambda channels, spec: channels % 2 == 0, "set an even one: RoPE rotates pairs"),
    SupportRule(
        "model.moe_expert_capacity_factor",
        lambda factor, spec: factor is None or spec.model.moe_pad_expert_input_to_capacity,
        "set model.moe_pad_expert_input_to_capacity=true, or model.moe_expert_capacity_factor=null (dropless)",
    ),
    SupportRule("model.hidden_size", _grouped_mm_width, "set a multiple of 8, or resources.device=cpu"),
    SupportRule("model.moe_ffn_hidden_size", _grouped_mm_width, "set a multiple of 8, or resources.device=cpu"),
    fixed("parallelism.etp", 1),
    fixed("parallelism.cp", 1, remedy="set parallelism.cp=1, or engine=megatron"),
    SupportRule(
        "training.attention_backend",
        _expresses,
        "set training.attention_backend=auto: sdpa has neither windows, sinks nor packed documents, flex and "
        "transformer_engine run on CUDA, and transformer_engine takes bf16 without packed documents and is not compiled with "
        "the model (training.compile=whole, torch_compile)",
    ),
    fixed(
        "parallelism.overlap_grad_reduce",
        False,
        f"{OF_MEGATRON}: gradients are reduced in the backward pass here in any case",
    ),
    fixed("parallelism.overlap_param_gather", False, OF_MEGATRON),
    fixed("parallelism.overlap_moe_expert_parallel_comm", False, OF_MEGATRON),
    fixed("parallelism.delay_wgrad_compute", False, OF_MEGATRON),
    fixed("training.fp8", "none", remedy="set training.fp8=none, or engine=megatron"),
    fixed("training.gradient_accumulation_fusion", False, OF_MEGATRON),
    fixed("training.moe_router_fusion", False, OF_MEGATRON),
    fixed("training.cpu_offloading", False),
    fixed("training.variable_sequence_lengths", False),
    SupportRule(
        "cuda_graph.impl",
        lambda impl, spec: not spec.cuda_graph.implementation.needs_cuda or spec.placement.device == "cuda",
        "set cuda_graph.impl=none or torch_compile, or resources.device=cuda",
    ),
    SupportRule(
        "cuda_graph.impl",
        lambda impl, spec: not spec.cuda_graph.implementation.compiles or _lies_whole(spec),
        "set cuda_graph.impl=none, or tp, pp and ep to 1: collectives break the graph",
    ),
    SupportRule(
        "training.compile",
        lambda choice, spec: choice != "whole" or _lies_whole(spec),
        "set training.compile=none or elementwise, or tp, pp and ep to 1: collectives break the graph",
    ),
    SupportRule(
        "cuda_graph.impl",
        lambda impl, spec: spec.training.compile != "whole" or not spec.cuda_graph.implementation.takes_scope,
        "set cuda_graph.impl=full_iteration or torch_compile, or training.compile=none or elementwise: with "
        "training.compile=whole the model is one compiled function, of which no layer or part can be captured",
    ),
    SupportRule(
        "digest_steps",
        lambda steps, spec: not steps or not spec.compiles_whole,
        "look into another implementation, without training.compile=whole: Inductor's kernels round otherwise than those they "
        "replace, so that all layers differ in their bits, whatever is at fault",
    ),
)
