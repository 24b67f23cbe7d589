"""Rules on the settings that engine megatron supports with Megatron-Core 0.16.1 and 0.19.2, and their known faults."""

from __future__ import annotations

from dataclasses import replace

from launch.contract.graph_impls import SCOPE_PARTS
from launch.contract.spec import Model, RunSpec
from launch.support.rule import (
    CONFIG,
    DROPOUT,
    GRAPH,
    MCORE,
    NO_DROPOUT,
    RECOMPUTED,
    UNPACKED,
    MegatronRule,
    Rule,
    deterministic_sinks,
    field_value,
    fixed,
    padded_capacity,
)

WITHOUT_ATTENTION = "cuda_graph.scope=[moe_router, moe_preprocess], or cuda_graph.scope=[mlp]"
"""The parts to capture without attention."""
WHOLE_STEP = "cuda_graph.impl=full_iteration and cuda_graph.scope=[]"
KEEP_ALL = "training.recompute=none and training.recompute_modules=[]"


def _reuses_first_graph(spec: RunSpec) -> bool:
    """Return whether the graph of the first micro-batch is replayed for the others.

    Megatron-Core does so if micro-batches run one after another (transformer/cuda_graphs.py:2046). With fp8, modules do not
    treat the first micro-batch differently.
    """
    layout = spec.parallelism
    shared = layout.pp == 1 and not layout.overlap_moe_expert_parallel_comm and spec.training.fp8 == "none"
    return shared and spec.cuda_graph.impl == "transformer_engine" and spec.num_microbatches > 1


def _lacks_router(model: Model) -> bool:
    """Return whether Megatron-Core lacks this router (transformer/moe/moe_utils.py, topk_routing_with_score_function).

    It never normalises the weight of a single chosen expert, and always normalises sigmoid weights of several experts.
    """
    softmax_last = model.moe_router_order == "topk_then_softmax"
    if model.moe_router_score_function == "sigmoid":
        return softmax_last or model.moe_router_normalize_topk != (model.moe_router_topk > 1)
    return model.moe_router_topk <= 1 and (softmax_last or model.moe_router_normalize_topk)


def _has_other_llama3_scaling(model: Model) -> bool:
    scaling = (model.rope_original_max_position, model.rope_low_freq_factor, model.rope_high_freq_factor)
    return model.rope_scaling == "llama3" and scaling != (8192, 1.0, 4.0)


def _captures_attention(spec: RunSpec) -> bool:
    return spec.cuda_graph.implementation.takes_scope and "attention" in spec.captured_parts


CHECKPOINTED = {
    "core_attn": SCOPE_PARTS["attn"],
    "mlp": SCOPE_PARTS["mlp"],
    "moe": SCOPE_PARTS["moe"],
    "shared_experts": SCOPE_PARTS["moe_router"],
}
"""The parts of a layer that each module recomputes by Megatron-Core's ``checkpoint``."""


def _checkpoints_within_graphs(spec: RunSpec) -> bool:
    held = (CHECKPOINTED.get(name, frozenset()) for name in spec.training.recomputed)
    return spec.cuda_graph.implementation.takes_scope and any(
        not spec.captured_parts.isdisjoint(parts) for parts in held
    )


def _captures_recomputed_norm(spec: RunSpec) -> bool:
    """Return whether a layer's graph contains the norm before the experts and this norm is recomputed."""
    captures_norm = spec.cuda_graph.implementation.takes_scope and not spec.captured_parts.isdisjoint(
        {"router", "experts"}
    )
    return captures_norm and "layernorm" in spec.training.recomputed


MENDS = ("fused_gradients", "local_inputs", "yarn_positions")
"""The faults that the engine repairs if ``cuda_graph.mend`` names them (launch/engines/megatron/mends/)."""


def _name(fault: Rule) -> str:
    return fault.id.removeprefix("megatron.")


def needed_mends(spec: RunSpec) -> tuple[str, ...]:
    """Return the mends of ``spec`` that it needs, because it would have their fault without them."""
    faults = {_name(fault) for fault in FAULTS if fault.judge(spec)}
    return tuple(mend for mend in spec.cuda_graph.mend if mend in faults)


FAULTS: tuple[Rule, ...] = (
    MegatronRule(
        "megatron.local_inputs", ("cuda_graph.impl",),
        "a local graph returns its input to a buffer pool before its own backward pass reads it, so the gradient of the first "
        "layer's norm is wrong (observed; fixed by Megatron-LM pull request 4433)",
        lambda spec: spec.cuda_graph.impl == "local",
        fix=f"Set cuda_graph.impl=transformer_engine, or {WHOLE_STEP}, or megatron_core=0.19.",
        source=f"{MCORE}transformer/cuda_graphs.py:995",
        releases=("0.16",),
    ),
    MegatronRule(
        "megatron.yarn_positions", ("model.rope_scaling", *GRAPH),
        "TECudaGraphHelper silently captures attention of a YaRN model without positions",
        lambda spec: spec.model.rope_scaling == "yarn"
        and spec.cuda_graph.impl == "transformer_engine"
        and _captures_attention(spec),
        fix=f"Set {WITHOUT_ATTENTION}, or {WHOLE_STEP}, or engine=torch_native.",
        source=f"{MCORE}transformer/cuda_graphs.py:1863",
    ),
    MegatronRule(
        "megatron.fused_gradients",
        ("training.gradient_accumulation_fusion", "cuda_graph.impl", "parallelism.pp", "num_microbatches"),
        "one graph replays all micro-batches, and transformer-engine 2.11 captures it for the first one, so each replay "
        "overwrites gradients instead of adding to them (observed; fixed by TransformerEngine pull request 2715)",
        lambda spec: spec.training.gradient_accumulation_fusion and _reuses_first_graph(spec),
        fix=f"Set training.gradient_accumulation_fusion=false, or {WHOLE_STEP}, or parallelism.pp=2, or a global_batch_size of one "
        "micro-batch per step.",
        source="transformer_engine 2.11 pytorch/graph.py:484",
    ),
)  # fmt: skip


def _unless_mended(fault: Rule) -> Rule:
    name = _name(fault)
    if name not in MENDS:
        return fault
    return replace(
        fault,
        violated=lambda spec: name not in spec.cuda_graph.mend and fault.violated(spec),
        fix=f"Set cuda_graph.mend=[{name}], or {fault.fix.removeprefix('Set ')}",
    )


KNOWN_FAULTS: tuple[Rule, ...] = tuple(map(_unless_mended, FAULTS))
"""Wrong computations of the libraries that the engine nevertheless runs. A cell runs only if its verdict can show the fault."""


CORRECTED: tuple[Rule, ...] = (
    MegatronRule(
        "megatron.router_bias", ("model.add_bias_linear", "model.num_moe_experts", "training.precision"),
        "a router's bias is read as fp32, and so beyond its end, in eager code too, in 0.16 only with transformer-engine before 2.10 "
        "(observed; Transformer Engine issue 3562)",
        lambda spec: spec.model.add_bias_linear and spec.model.is_moe and spec.training.precision == "bf16",
        fix="Leave out --moe-router-dtype fp32, or set model.add_bias_linear=false.",
        source=f"{MCORE}transformer/moe/moe_utils.py:1193",
    ),
)  # fmt: skip
"""Wrong computations that the engine corrects in every run (launch/engines/megatron/router_bias.py). A user's program has them."""


HYBRID_DEFAULTS = (
    "model.num_moe_experts", "model.activation", "model.qk_layernorm", "model.add_bias_linear", "model.rope_scaling", "model.window_size",
    "model.attention_sinks", *DROPOUT, "parallelism.tp", "parallelism.cp", "parallelism.pp", "training.recompute", "training.fp8",
    "training.gradient_accumulation_fusion", "training.capturable_optimizer", "training.deterministic", "data.packed_sequences",
)  # fmt: skip
"""Fields at whose defaults a hybrid model runs. Megatron-Core's stack ignores query and key norms, scaled positions and (0.16)
recomputation. Nothing here has run the others with it. Two kernels of causal-conv1d 1.7.0 add in no fixed order."""


def _unfit_for_hybrid(spec: RunSpec) -> list[str]:
    default = RunSpec()
    wrong = [field for field in HYBRID_DEFAULTS if field_value(spec, field) != field_value(default, field)]
    return ["model.hybrid_override_pattern", *wrong] if spec.model.is_hybrid and wrong else []


SILENT = ("precision", "recompute_norm", "tp", "overlap_moe_expert_parallel_comm")
"""Rules of ``RULES`` that reject silent faults of Megatron-Core."""


def _refused_without_evidence(fault: Rule) -> Rule:
    """Return the rule that ``fault`` needs deterministic mode or step checks, because noise would hide it in curves."""
    return replace(
        fault,
        fields=(*fault.fields, "training.deterministic", "step_checks"),
        violated=lambda spec: bool(fault.violated(spec)) and not spec.training.deterministic and spec.step_checks == 0,
        fix=f"{fault.fix} Or set training.deterministic=true, or step_checks=5: the verdict then shows the fault.",
    )


PACKING: tuple[Rule, ...] = (
    MegatronRule(
        "megatron.packed_sequences", ("data.packed_sequences", "data.max_documents"),
        "the engine pads the document boundaries (cu_seqlens) to data.max_documents",
        lambda spec: spec.data.packed_sequences and spec.data.max_documents is None,
        fix="Set data.max_documents=256, or data.packed_sequences=false, or engine=torch_native.",
        source="Megatron Bridge 0.6.2 data/packing/gpt_sft.py (pad_cu_seqlens)",
    ),
    MegatronRule(
        "megatron.packed_batch", ("data.packed_sequences", "training.micro_batch_size"),
        "a micro-batch is one packed sequence, because the packed format has no batch dimension",
        lambda spec: spec.data.packed_sequences and spec.training.micro_batch_size != 1,
        fix=f"Set training.micro_batch_size=1, or {UNPACKED}.",
        source=f"{MCORE}transformer/attention.py:1066",
    ),
    MegatronRule(
        "megatron.packed_cp", ("data.packed_sequences", "parallelism.cp"),
        "context parallelism would have to divide every document into 2 * cp parts",
        lambda spec: spec.data.packed_sequences and spec.parallelism.cp > 1,
        fix=f"Set parallelism.cp=1, or {UNPACKED}.",
        source="transformer_engine 2.11 pytorch/attention/dot_product_attention/context_parallel.py:417",
    ),
    MegatronRule(
        "megatron.packed_sinks", ("data.packed_sequences", "model.attention_sinks"),
        "Transformer Engine before 2.12, which this release requires, has no attention for packed sequences with sinks",
        lambda spec: spec.data.packed_sequences and spec.model.attention_sinks,
        fix=f"Set megatron_core=0.19 (with Transformer Engine 2.12), or {UNPACKED}, or engine=torch_native.",
        source="transformer_engine 2.11 pytorch/attention/dot_product_attention/utils.py:718",
        releases=("0.16",),
    ),
)  # fmt: skip


RULES: tuple[Rule, ...] = (
    *map(_refused_without_evidence, KNOWN_FAULTS),
    MegatronRule(
        "megatron.mend", ("cuda_graph.mend", *GRAPH, "model.rope_scaling", "training.gradient_accumulation_fusion"),
        f"a mend ({', '.join(MENDS)}) is only for cells with the known fault that it repairs",
        lambda spec: needed_mends(spec) != spec.cuda_graph.mend,
        fix="Set cuda_graph.mend=[].",
    ),
    MegatronRule(
        "megatron.step_checks", ("step_checks", "parallelism.overlap_moe_expert_parallel_comm"),
        "this overlap runs layers in pieces, and a step check cannot perturb a piece",
        lambda spec: spec.step_checks != 0 and spec.parallelism.overlap_moe_expert_parallel_comm,
        fix="Set parallelism.overlap_moe_expert_parallel_comm=false, or step_checks=0 (not in quick mode).",
    ),
    fixed(
        "megatron", "placement.device", "cuda",
        "Set resources.device=cuda, or engine=torch_native: Megatron-Core's schedules and optimizers allocate on a GPU.",
    ),
    fixed("megatron", "model.weights", "random", "Set model.weights=random, or engine=torch_native."),
    MegatronRule(
        "megatron.hybrid", (), "the engine runs hybrid models only with these fields at their defaults",
        _unfit_for_hybrid,
        fix="Leave the named fields out, or set model.hybrid_override_pattern='', or run your own program with them by engine: command. "
        "Instead of training.deterministic, set step_checks=5.",
        source=f"{MCORE}models/mamba/mamba_layer_specs.py, ssm/mamba_block.py; causal-conv1d 1.7.0 csrc/causal_conv1d_bwd.cu:504",
    ),
    MegatronRule(
        "megatron.optimizer_precision", ("training.optimizer_precision", "parallelism.distributed_optimizer"),
        "Megatron-Core's precision-aware optimizer needs distributed_optimizer",
        lambda spec: spec.training.optimizer_precision == "lean" and not spec.parallelism.distributed_optimizer,
        fix="Set parallelism.distributed_optimizer=true, or training.optimizer_precision=fp32, or engine=torch_native.",
        source=f"{MCORE}optimizer/optimizer_config.py:379",
    ),
    MegatronRule(
        "megatron.optimizer", ("cuda_graph.optimizer", "training.capturable_optimizer"),
        "this release has no optimizer that a graph can contain",
        lambda spec: spec.cuda_graph.optimizer or spec.training.capturable_optimizer,
        fix="Set cuda_graph.optimizer=false and training.capturable_optimizer=false, or megatron_core=0.19 and "
        "training.capturable_optimizer=true.",
        source="megatron-core 0.19.2 optimizer/optimizer_config.py:392 (absent in 0.16.1)",
        releases=("0.16",),
    ),
    MegatronRule(
        "megatron.capturable_optimizer", ("cuda_graph.optimizer", "training.capturable_optimizer"),
        "a graph can contain only the capturable Adam, and the eager baseline must have it too, because it rounds differently",
        lambda spec: spec.cuda_graph.optimizer and not spec.training.capturable_optimizer,
        fix="Set training.capturable_optimizer=true, or cuda_graph.optimizer=false.",
        source="megatron-core 0.19.2 optimizer/__init__.py:551",
        releases=("0.19",),
    ),
    MegatronRule(
        "megatron.capturable_optimizer", ("training.capturable_optimizer", "training.optimizer_precision"),
        "Transformer Engine's capturable Adam keeps masters and moments in fp32",
        lambda spec: spec.training.capturable_optimizer and spec.training.optimizer_precision == "lean",
        fix="Set training.optimizer_precision=fp32, or training.capturable_optimizer=false and cuda_graph.optimizer=false.",
        source="transformer_engine 2.11 pytorch/optimizers/fused_adam.py:148",
        releases=("0.19",),
    ),
    MegatronRule(
        "megatron.optimizer",
        ("cuda_graph.optimizer", "parallelism.ep", "parallelism.etp", "parallelism.distributed_optimizer"),
        "experts that have their own ranks also have their own gradient norm, and the host adds it, which a graph cannot do",
        lambda spec: spec.cuda_graph.optimizer and spec.model.is_moe and not spec.parallelism.distributed_optimizer
        and (spec.parallelism.ep > 1 or spec.parallelism.etp != spec.parallelism.tp),
        fix="Set parallelism.distributed_optimizer=true, or cuda_graph.optimizer=false.",
        source="megatron-core 0.19.2 optimizer/optimizer.py:1773",
        releases=("0.19",),
    ),
    MegatronRule(
        "megatron.rope_scaling",
        ("model.rope_scaling", "model.rope_original_max_position", "model.rope_low_freq_factor", "model.rope_high_freq_factor"),
        "llama3 scaling of Megatron-Core has fixed values (those of Llama 3)",
        lambda spec: _has_other_llama3_scaling(spec.model),
        fix="Set model.rope_original_max_position=8192 and model.rope_low_freq_factor=1 and model.rope_high_freq_factor=4, or "
        "engine=torch_native.",
        source=f"{MCORE}models/common/embeddings/rotary_pos_embedding.py",
    ),
    MegatronRule(
        "megatron.moe_router_normalize_topk",
        ("model.moe_router_normalize_topk", "model.moe_router_score_function", "model.moe_router_order", "model.moe_router_topk"),
        "Megatron-Core never normalises the weight of one expert, and always normalises the sigmoid weights of several",
        lambda spec: spec.model.is_moe and _lacks_router(spec.model),
        fix="Set model.moe_router_order=softmax_then_topk and model.moe_router_normalize_topk=true, or "
        "model.moe_router_order=softmax_then_topk and model.moe_router_normalize_topk=false, or engine=torch_native.",
        source=f"{MCORE}transformer/moe/moe_utils.py topk_routing_with_score_function",
    ),
    padded_capacity("megatron"),
    MegatronRule(
        "megatron.moe_shared_expert_ffn_hidden_size", ("model.moe_shared_expert_ffn_hidden_size", "model.add_bias_linear"),
        "Megatron-Core's shared expert has no biases",
        lambda spec: spec.model.moe_shared_expert_ffn_hidden_size != 0 and spec.model.add_bias_linear,
        fix="Set model.add_bias_linear=false.",
    ),
    MegatronRule(
        "megatron.moe_pad_expert_input_to_capacity",
        ("model.moe_expert_capacity_factor", "model.moe_router_topk", "model.num_moe_experts"),
        "an expert's capacity exceeds the number of tokens, and then Megatron-Core pads no expert and fails with a shape error",
        lambda spec: spec.model.is_moe
        and spec.model.moe_pad_expert_input_to_capacity
        and (spec.model.moe_expert_capacity_factor or 0) * spec.model.moe_router_topk > spec.model.num_moe_experts,
        fix="Set moe_expert_capacity_factor to num_moe_experts / moe_router_topk or less, or engine=torch_native.",
        source=f"{MCORE}transformer/moe/moe_utils.py:839",
    ),
    MegatronRule(
        "megatron.tp", ("parallelism.tp", "parallelism.etp", "parallelism.ep"),
        "with ep=1 Megatron-Core reduces the gradients of experts over dp and cp, so etp must equal tp",
        lambda spec: spec.model.is_moe and spec.parallelism.ep <= 1 and spec.parallelism.tp != spec.parallelism.etp,
        fix="Set parallelism.etp to tp, or parallelism.tp=1, or parallelism.ep=2, or megatron_core=0.19.",
        releases=("0.16",),
    ),
    MegatronRule(
        "megatron.overlap_moe_expert_parallel_comm",
        ("parallelism.overlap_moe_expert_parallel_comm", "model.num_layers", "model.moe_layer_freq"),
        "if the last layer is dense, Megatron-Core leaves the final norm out of the model",
        lambda spec: spec.parallelism.overlap_moe_expert_parallel_comm
        and (spec.model.num_layers - 1) % max(spec.model.moe_layer_freq, 1) != 0,
        fix="Set parallelism.overlap_moe_expert_parallel_comm=false, or a num_layers whose last layer has experts.",
        source=f"{MCORE}models/gpt/fine_grained_callables.py:583",
    ),
    MegatronRule(
        "megatron.overlap_moe_expert_parallel_comm",
        ("parallelism.overlap_moe_expert_parallel_comm", "parallelism.ep", "model.num_moe_experts"),
        "on a rank with one expert Megatron-Core frees tokens before its backward pass has read them",
        lambda spec: spec.parallelism.overlap_moe_expert_parallel_comm
        and spec.parallelism.ep == spec.model.num_moe_experts
        and spec.parallelism.etp <= 1,
        fix="Set parallelism.overlap_moe_expert_parallel_comm=false, or ep below num_moe_experts, or megatron_core=0.19.",
        source=f"{MCORE}models/gpt/fine_grained_callables.py:74",
        releases=("0.16",),
    ),
    MegatronRule(
        "megatron.cp", ("parallelism.cp", "model.window_size", "model.attention_sinks", "training.precision"),
        "Transformer Engine's ring attention needs bf16, and supports no windows or sinks",
        lambda spec: spec.parallelism.cp != 1
        and not (spec.model.attends_to_all and spec.training.precision == "bf16"),
        fix="Set parallelism.cp=1, or training.precision=bf16 for a model without windows and sinks.",
        source="transformer_engine 2.11 pytorch/attention/dot_product_attention/context_parallel.py:4026, :4046, utils.py:756",
    ),
    MegatronRule(
        "megatron.schedule", ("parallelism.schedule", "parallelism.pp"), "Megatron-Core has no GPipe schedule",
        lambda spec: spec.parallelism.schedule == "gpipe" and spec.parallelism.pp != 1,
        fix="Set parallelism.schedule=1f1b, or engine=torch_native.",
    ),
    fixed("megatron", "training.compile", "none"),
    MegatronRule(
        "megatron.attention_backend", ("training.attention_backend",), "megatron's layers use Transformer Engine's attention",
        lambda spec: spec.training.attention_backend not in ("auto", "transformer_engine"),
        fix="Set training.attention_backend=auto.",
    ),
    deterministic_sinks("megatron", ("auto", "transformer_engine"), "engine=torch_native"),
    MegatronRule(
        "megatron.moe_router_fusion", ("training.moe_router_fusion", "model.num_moe_experts", "training.deterministic"),
        "the fusion needs a router, and deterministic mode excludes it because its kernels may add numbers in a varying order",
        lambda spec: spec.training.moe_router_fusion and (not spec.model.is_moe or spec.training.deterministic),
        fix="Set training.moe_router_fusion=false.",
    ),
    fixed("megatron", "training.fp8_weight_caching", True, "Set training.fp8_weight_caching=true, or engine=torch_native."),
    fixed("megatron", "training.cpu_offloading", False),
    fixed("megatron", "training.variable_sequence_lengths", False),
    *PACKING,
    MegatronRule(
        "megatron.recompute", RECOMPUTED,
        "capturing a layer calls torch.autograd.grad, and Megatron-Core's recomputation supports that call only for layernorm "
        "and moe_act",
        _checkpoints_within_graphs,
        fix=f"Set {WITHOUT_ATTENTION}, or cuda_graph.scope=[attn], or {WHOLE_STEP}, or {KEEP_ALL}.",
        source=f"{MCORE}tensor_parallel/random.py:539",
    ),
    MegatronRule(
        "megatron.dropout", (*DROPOUT, *RECOMPUTED),
        "Megatron-Core's recomputation keeps references to the tracker's generators, not their states, so its masks would differ "
        "from those of the forward pass",
        lambda spec: spec.training.draws_again(spec.model),
        fix=f"Set {KEEP_ALL}, or {NO_DROPOUT}, or engine=torch_native.",
        source=f"{MCORE}tensor_parallel/random.py:438, torch.Generator.graphsafe_get_state",
    ),
    MegatronRule(
        "megatron.dropout", ("model.hidden_dropout", *RECOMPUTED),
        "Megatron-Core refuses hidden dropout where a graph of the whole step recomputes an MLP or experts",
        lambda spec: spec.model.hidden_dropout > 0
        and not spec.training.recomputed.isdisjoint({"mlp", "moe"})
        and spec.cuda_graph.implementation.extent == "step",
        fix=f"Set {KEEP_ALL}, or model.hidden_dropout=0.",
        source=f"{CONFIG}:1812",
    ),
    MegatronRule(
        "megatron.recompute_norm", RECOMPUTED,
        "a graph that recomputes the norm before the experts gives the norm's weight no gradient",
        _captures_recomputed_norm,
        fix=f"Set cuda_graph.scope=[attn], or cuda_graph.scope=[mlp], or {WHOLE_STEP}, or {KEEP_ALL}.",
        source=f"{MCORE}tensor_parallel/random.py:614; transformer_engine 2.11 pytorch/graph.py:609 (torch.autograd.grad)",
    ),
    MegatronRule(
        "megatron.recompute_dense_norm", ("training.recompute_modules", "model.num_moe_experts"),
        "Transformer Engine puts a dense layer's norms into its linear layers, which recompute nothing",
        lambda spec: "layernorm" in spec.training.recomputed and not spec.model.is_moe,
        fix="Set training.recompute_modules=[], or training.recompute_modules=[mlp], or engine=torch_native.",
        source=f"{MCORE}models/gpt/gpt_layer_specs.py (TELayerNormColumnParallelLinear)",
    ),
    MegatronRule(
        "megatron.recompute_act", ("training.recompute_modules", "cuda_graph.impl"),
        "a local graph leaves the process in warm-up mode, which keeps activations and norms instead of recomputing them",
        lambda spec: spec.cuda_graph.impl == "local" and not spec.training.recomputed.isdisjoint({"layernorm", "moe_act"}),
        fix=f"Set cuda_graph.impl=transformer_engine, or {KEEP_ALL}, or megatron_core=0.19.",
        source=f"{MCORE}transformer/cuda_graphs.py:112",
        releases=("0.16",),
    ),
    MegatronRule(
        "megatron.local_pipeline", ("cuda_graph.impl", "parallelism.pp", "num_microbatches"),
        "a local capture needs each rank's forward passes to end before its first backward pass, because all micro-batches of a "
        "stage share the buffer of its rotary embeddings (observed; since Megatron-LM pull request 5975)",
        lambda spec: spec.cuda_graph.impl == "local" and spec.parallelism.pp > 1 and spec.num_microbatches > 1,
        fix=f"Set cuda_graph.impl=transformer_engine, or {WHOLE_STEP} and parallelism.batch_p2p_sync=false, or parallelism.pp=1, or "
        "megatron_core=0.16 and cuda_graph.mend=[local_inputs].",
        source="megatron-core 0.19.2 transformer/cuda_graphs.py:617, :1245; models/common/embeddings/rotary_pos_embedding.py:177",
        releases=("0.19",),
    ),
    MegatronRule(
        "megatron.precision", ("training.precision", *GRAPH),
        "TECudaGraphHelper captures with bfloat16 inputs: an fp32 capture of attention fails, and an fp32 capture of later "
        "parts silently rounds their inputs (observed; with 0.19.2 it fails too)",
        lambda spec: spec.training.precision == "fp32" and spec.cuda_graph.impl == "transformer_engine",
        fix="Set training.precision=bf16, or cuda_graph.impl=full_iteration and cuda_graph.scope=[].",
        source=f"{MCORE}transformer/module.py:247",
    ),
    MegatronRule(
        "megatron.batch_p2p_sync", ("parallelism.pp", "parallelism.vpp", "parallelism.batch_p2p_sync", "cuda_graph.impl"),
        "stages that are not interleaved wait for the whole device in each transfer, and no capture allows that",
        lambda spec: spec.parallelism.batch_p2p_sync
        and spec.parallelism.pp != 1
        and spec.parallelism.vpp <= 1
        and spec.cuda_graph.implementation.extent == "step",
        fix="Set parallelism.batch_p2p_sync=false, or parallelism.pp=1, or parallelism.vpp=2 and "
        "parallelism.schedule=interleaved, or cuda_graph.impl=transformer_engine, or cuda_graph.impl=transformer_engine and "
        "cuda_graph.scope=[moe_router, moe_preprocess].",
        source=f"{MCORE}pipeline_parallel/p2p_communication.py:395",
    ),
)  # fmt: skip

SILENT_REFUSALS: tuple[Rule, ...] = tuple(rule for rule in RULES if _name(rule) in SILENT)
