"""Rules on what a captured region cannot contain, and on what a capture requires of its run."""

from __future__ import annotations

from launch.contract.spec import Model, RunSpec
from launch.support.expandable_segments import REGISTER, expandable_segments_setting
from launch.support.rule import CONFIG, GRAPH, MCORE, UNCOMPILED, UNPACKED, MegatronRule, NativeRule, Rule

EXPERTS = (
    *GRAPH, "model.moe_expert_capacity_factor", "model.moe_pad_expert_input_to_capacity", "parallelism.dispatcher",
    "parallelism.ep",
)  # fmt: skip
PADDED = "model.moe_expert_capacity_factor=1.0 and model.moe_pad_expert_input_to_capacity=true (another task: tokens are dropped)"
ROUTERS_ALONE = (
    "cuda_graph.impl=transformer_engine and cuda_graph.scope=[attn, moe_router], or cuda_graph.impl=torch and "
    "cuda_graph.scope=[attn, moe_router]"
)

PACKED_PARTS = (
    "cuda_graph.impl=transformer_engine and cuda_graph.scope=[moe_router, moe_preprocess], or "
    "cuda_graph.impl=transformer_engine and cuda_graph.scope=[mlp]"
)
"""What to capture of a model on packed sequences: parts without attention."""
PACKED_STEP = "cuda_graph.impl=full_iteration and cuda_graph.scope=[] and megatron_core=0.19"


def _captures_experts(spec: RunSpec) -> bool:
    # torch_compile leaves experts between its graphs if they wait for the host.
    return "experts" in spec.captured_parts and not spec.cuda_graph.implementation.compiles


def _is_drop_and_pad(model: Model) -> bool:
    return model.moe_expert_capacity_factor is not None and model.moe_pad_expert_input_to_capacity


def _captures_dropless_experts(spec: RunSpec) -> bool:
    return _captures_experts(spec) and not _is_drop_and_pad(spec.model)


def _captures_packed_step(spec: RunSpec) -> bool:
    return spec.data.packed_sequences and spec.cuda_graph.implementation.extent == "step"


def _preprocessing_waits(spec: RunSpec) -> bool:
    model = spec.model
    drops = model.is_moe and model.moe_expert_capacity_factor is not None and not _is_drop_and_pad(model)
    return "moe_preprocess" in spec.cuda_graph.scope and spec.parallelism.dispatcher == "alltoall" and drops


def _captures_packed_attention(spec: RunSpec) -> bool:
    graph = spec.cuda_graph
    return spec.data.packed_sequences and graph.implementation.takes_scope and "attention" in spec.captured_parts


def _registered_segments(spec: RunSpec) -> list[str]:
    uses_graphs = spec.graphed and (spec.placement.device == "cuda" or spec.cuda_graph.implementation.needs_cuda)
    setting = expandable_segments_setting(spec.environment)
    registered = spec.environment.get(REGISTER, "0") != "0"
    return [f"environment.{setting}", f"environment.{REGISTER}"] if uses_graphs and setting and registered else []


RULES: tuple[Rule, ...] = (
    MegatronRule(
        "capture.megatron_expert_sync", EXPERTS,
        "captured experts need drop-and-pad and dispatcher alltoall, since any other dispatch waits for the host (local "
        "captures whole layers, and so their experts too)",
        lambda spec: _captures_experts(spec)
        and not (_is_drop_and_pad(spec.model) and spec.parallelism.dispatcher == "alltoall"),
        fix="Set cuda_graph.impl=transformer_engine and cuda_graph.scope=[attn, moe_router, moe_preprocess], or "
        "cuda_graph.impl=transformer_engine and cuda_graph.scope=[moe_router, moe_preprocess], or "
        f"parallelism.dispatcher=alltoall and {PADDED}, or engine=torch_native, or engine=torch_native and "
        "parallelism.dispatcher=allgather.",
        source=f"{CONFIG}:1764 (moe); {MCORE}transformer/moe/token_dispatcher.py:899, :295 and "
        "transformer/transformer_layer.py:472 (all others: accepted, fail in the capture)",
    ),
    NativeRule(
        "capture.native_expert_sync", EXPERTS,
        "captured dropless experts need dispatcher allgather or ep=1, since all-to-all reads its split sizes on the host",
        lambda spec: _captures_dropless_experts(spec) and spec.parallelism.dispatcher != "allgather" and spec.parallelism.ep > 1,
        fix=f"Set {ROUTERS_ALONE}, or parallelism.dispatcher=allgather, or parallelism.ep=1.",
        source="torch.distributed.all_to_all_single takes its split sizes as Python integers",
    ),
    NativeRule(
        "capture.native_fp32_experts", (*GRAPH, "training.precision"),
        "captured dropless experts must be bf16, since with fp32 the host must read the number of rows of each expert",
        lambda spec: _captures_dropless_experts(spec) and (spec.placement.device, spec.training.precision) == ("cuda", "fp32"),
        fix=f"Set {ROUTERS_ALONE}, or training.precision=bf16, or {PADDED}.",
        source="torch.nn.functional.grouped_mm has no float32 kernel on CUDA that leaves offsets on the device",
    ),
    NativeRule(
        "capture.native_fp8_experts", (*GRAPH, "training.fp8"),
        "captured experts in fp8 must have a capacity, since otherwise the host must read the number of rows of each expert",
        lambda spec: _captures_dropless_experts(spec) and spec.training.fp8 != "none",
        fix=f"Set {ROUTERS_ALONE}, or training.fp8=none, or {PADDED}.",
        source="transformer_engine 2.11 pytorch/module/grouped_linear.py:755 (m_splits are Python integers)",
    ),
    MegatronRule(
        "capture.preprocess_sync", EXPERTS,
        "moe_preprocess with a capacity factor needs padding to capacity, since the host would wait for its output size "
        "otherwise",
        _preprocessing_waits,
        fix="Set cuda_graph.scope=[attn, moe_router], or cuda_graph.scope=[moe_router], or "
        "model.moe_pad_expert_input_to_capacity=true, or model.moe_expert_capacity_factor=null.",
        source=f"{CONFIG}:1772; {MCORE}transformer/moe/token_dispatcher.py:512",
    ),
    MegatronRule(
        "capture.packed_sequences", ("data.packed_sequences", *GRAPH),
        "a graph of attention takes only tensors, and the boundaries of packed sequences are not tensors",
        lambda spec: spec.cuda_graph.impl == "transformer_engine" and _captures_packed_attention(spec),
        fix=f"Set {PACKED_PARTS}, or {PACKED_STEP}, or {UNPACKED}.",
        source=f"{MCORE}transformer/transformer_layer.py:1020; megatron-core 0.19.2 transformer/transformer_layer.py:1224",
    ),
    MegatronRule(
        "capture.packed_local", ("data.packed_sequences", *GRAPH),
        "a local graph fixes the number and the lengths of packed sequences when it is captured",
        lambda spec: spec.cuda_graph.impl == "local" and _captures_packed_attention(spec),
        fix=f"Set {PACKED_PARTS}, or {PACKED_STEP}, or {UNPACKED}.",
        source=f"{MCORE}transformer/cuda_graphs.py:1273, :1291",
    ),
    MegatronRule(
        "capture.packed_whole_step", ("data.packed_sequences", "cuda_graph.impl"),
        "a whole step over packed sequences ended in an illegal memory access on an H200",
        _captures_packed_step,
        fix=f"Set {PACKED_PARTS}, or megatron_core=0.19, or {UNPACKED}.",
        source="docs/megatron.md#packed-sequences; tests/gpu/test_gpu_packed.py passes with megatron-core 0.19.2",
        releases=("0.16",),
    ),
    MegatronRule(
        "capture.packed_yarn", ("data.packed_sequences", "model.rope_scaling", "cuda_graph.impl"),
        "YaRN's scale needs unfused rotary embeddings, which read the lengths of packed sequences on the host",
        lambda spec: _captures_packed_step(spec) and spec.model.rope_scaling == "yarn",
        fix=f"Set {PACKED_PARTS}, or {UNPACKED}.",
        source=f"{MCORE}models/common/embeddings/rope_utils.py:204; megatron-core 0.19.2, the same file:222",
    ),
    NativeRule(
        "capture.native_packed_attention", ("data.packed_sequences", *GRAPH),
        "a layer's graph keeps the attention mask of its capture, and every batch of packed sequences has its own",
        _captures_packed_attention,
        fix="Set cuda_graph.scope=[moe_router, moe_preprocess], or cuda_graph.scope=[mlp], or cuda_graph.impl=full_iteration and "
        f"cuda_graph.scope=[], or {UNPACKED}.",
        source="torch.cuda.graph: a replay reads the memory that the capture read",
    ),
    NativeRule(
        "capture.native_packed_compiled", ("data.packed_sequences", "cuda_graph.impl", "training.compile"),
        "graphs of a model that is compiled as one function are untested on packed sequences",
        lambda spec: spec.data.packed_sequences and spec.cuda_graph.implementation.takes_whole_model and spec.compiles_whole,
        fix=f"Set cuda_graph.impl=full_iteration and training.compile=none, or {UNPACKED}.",
        source="tests/gpu/test_gpu_graphs.py captures packed sequences with training.compile=none and elementwise",
    ),
    NativeRule(
        "capture.native_packed_ranks", ("data.packed_sequences", "cuda_graph.impl", "parallelism.world_size"),
        "a graph of the whole step is untested on packed sequences with several ranks",
        lambda spec: _captures_packed_step(spec) and spec.parallelism.world_size > 1,
        fix=f"Set {UNPACKED}, or engine=megatron and megatron_core=0.19 and training.micro_batch_size=1 and "
        "data.max_documents=256, or use one rank.",
        source="tests/gpu/test_gpu_graphs.py captures packed sequences on one GPU",
    ),
    Rule(
        "capture.full_recompute", ("training.recompute", *GRAPH),
        "full recomputation needs full_iteration or no graphs, since it would run a layer's graph inside a checkpoint",
        lambda spec: spec.training.recompute == "full" and spec.cuda_graph.implementation.takes_scope,
        fix="Set cuda_graph.impl=full_iteration and cuda_graph.scope=[], or training.recompute=selective, or training.recompute=none.",
        source=f"{CONFIG}:1780",
    ),
    Rule(
        "capture.cpu_offloading", ("training.cpu_offloading", "cuda_graph.impl"),
        "graphs and CPU offloading exclude each other",
        lambda spec: spec.training.cpu_offloading and spec.graphed,
        fix="Set training.cpu_offloading=false.",
        source=f"{CONFIG}:1722",
    ),
    Rule(
        "capture.variable_lengths", ("training.variable_sequence_lengths", "cuda_graph.impl"),
        "graphs need fixed shapes",
        lambda spec: spec.training.variable_sequence_lengths and spec.graphed,
        fix="Set training.variable_sequence_lengths=false, and pad to training.sequence_length.",
        source=f"{MCORE}transformer/cuda_graphs.py:1256; torch.cuda.graph: a replay repeats the shapes of the capture",
    ),
    Rule(
        "capture.expandable_segments", (),
        f"graphs with expandable segments need {REGISTER}=0, since replays would read memory that has moved (a job sets it if "
        "it is unset)",
        _registered_segments,
        fix=f"Set environment.{REGISTER} to \"0\", leave it out, or remove expandable_segments:True.",
        source=f"{MCORE}transformer/cuda_graphs.py:1682 (TE), :1413 (local, below sm_100)",
    ),
    NativeRule(
        "capture.compiled_pipeline", ("cuda_graph.impl", "training.compile", "parallelism.pp"),
        "torch_compile and training.compile=whole need the whole model on each rank, so pp must be 1",
        lambda spec: spec.compiles_whole and spec.parallelism.pp > 1,
        fix=f"Set {UNCOMPILED}, or parallelism.pp=1.",
        source="a stage's sends and receives break the compiled graph, so its replay cannot be proven",
    ),
    NativeRule(
        "capture.compiled_alone", ("cuda_graph.impl", "training.deterministic", "training.compile"),
        "a bitwise comparison needs an eager baseline that is compiled in the same way, with training.compile=whole",
        lambda spec: spec.cuda_graph.implementation.compiles
        and spec.training.deterministic
        and spec.training.compile != "whole",
        fix="Set training.compile=whole, or training.deterministic=false.",
        source="docs/determinism.md: Inductor's kernels round differently from those they replace, with or without graphs",
    ),
    Rule(
        "capture.warmup", ("cuda_graph.warmup_steps", "cuda_graph.impl"),
        "full_iteration and transformer_engine need at least one warm-up step, which creates the communicators",
        lambda spec: spec.cuda_graph.warmup_steps < spec.cuda_graph.implementation.least_warmup_steps,
        fix="Set cuda_graph.warmup_steps=3, Megatron's default.",
        source="NCCL user guide, Using NCCL with CUDA Graphs: a communicator's first use must come before a capture",
    ),
)  # fmt: skip
