"""What a captured region cannot hold, and what a capture asks of the run around it."""

from __future__ import annotations

from launch.contract.spec import Model, RunSpec
from launch.support.expandable_segments import REGISTER, expandable_segments_setting
from orchestrator.rules.rule import (
    ANY,
    BOTH,
    CONFIG,
    MCORE,
    MCORE_016,
    MEGATRON,
    TORCH_NATIVE,
    Rule,
    compiled_text,
    scope_text,
)


def megatron_expert_sync(spec: RunSpec) -> str | None:
    """Experts inside a graph are drop-and-pad and dispatched by all-to-all: any other dispatch waits for the host."""
    drop_and_pad_alltoall = _is_drop_and_pad(spec.model) and spec.parallelism.dispatcher == "alltoall"
    if not _captures_experts(spec) or drop_and_pad_alltoall:
        return None
    return f"{scope_text(spec)} captures the experts, but {_expert_text(spec)}"


def native_expert_sync(spec: RunSpec) -> str | None:
    """Dropless experts inside a graph need dispatcher allgather or ep=1: all-to-all reads split sizes on the host."""
    parallelism = spec.parallelism
    static = _is_drop_and_pad(spec.model) or parallelism.dispatcher == "allgather" or parallelism.ep <= 1
    if not _captures_experts(spec) or static:
        return None
    return f"{scope_text(spec)} captures the experts, but {_expert_text(spec)}"


def preprocess_sync(spec: RunSpec) -> str | None:
    """moe_preprocess with a capacity factor needs padding to capacity, or its output size waits for the host."""
    model = spec.model
    dropping = model.is_moe and model.moe_expert_capacity_factor is not None and not _is_drop_and_pad(model)
    if "moe_preprocess" not in spec.cuda_graph.scope or spec.parallelism.dispatcher != "alltoall" or not dropping:
        return None
    return f"{scope_text(spec)} captures the dispatcher's preprocessing, but {_expert_text(spec)}"


def packed_sequences(spec: RunSpec) -> str | None:
    """Packed sequences need attention outside the graphs: their boundaries are no tensors of fixed shape."""
    captures_attention = not spec.cuda_graph.scope or "attn" in spec.cuda_graph.scope
    if not spec.data.packed_sequences or not spec.cuda_graph.implementation.takes_scope or not captures_attention:
        return None
    return f"data.packed_sequences=true, but {scope_text(spec)} captures attention"


def native_packed_whole_model(spec: RunSpec) -> str | None:
    """On torch_native the whole model cannot be captured with packed sequences: their number changes every step."""
    if not spec.data.packed_sequences or not spec.cuda_graph.implementation.takes_whole_model:
        return None
    return f"data.packed_sequences=true, but cuda_graph.impl={spec.cuda_graph.impl} captures attention"


def native_fp32_experts(spec: RunSpec) -> str | None:
    """Dropless experts inside a CUDA graph are bf16: in fp32 each is multiplied by itself, and the host reads how many
    rows it has."""
    on_cuda = spec.placement.device == "cuda" and spec.training.precision == "fp32"
    if not (on_cuda and _captures_experts(spec)) or _is_drop_and_pad(spec.model):
        return None
    return f"{scope_text(spec)} captures the experts with training.precision=fp32"


def full_recompute(spec: RunSpec) -> str | None:
    """Full recomputation goes with full_iteration or no graphs: it would run a scope's graph inside a checkpoint."""
    if spec.training.recompute != "full" or not spec.cuda_graph.implementation.takes_scope:
        return None
    return f"training.recompute=full with {scope_text(spec)}"


def cpu_offloading(spec: RunSpec) -> str | None:
    """Graphs and CPU offloading exclude each other."""
    if not spec.training.cpu_offloading or not spec.graphed:
        return None
    return f"training.cpu_offloading=true with cuda_graph.impl={spec.cuda_graph.impl}"


def variable_lengths(spec: RunSpec) -> str | None:
    """Graphs need fixed shapes."""
    if not spec.training.variable_sequence_lengths or not spec.graphed:
        return None
    return f"training.variable_sequence_lengths=true with cuda_graph.impl={spec.cuda_graph.impl}"


def expandable_segments(spec: RunSpec) -> str | None:
    """Graphs with expandable segments need NCCL_GRAPH_REGISTER=0, or replays read memory that has moved; the job sets it
    where nobody has."""
    compiled_on_cpu = not spec.cuda_graph.implementation.needs_cuda and spec.placement.device == "cpu"
    register = spec.environment.get(REGISTER)
    if not spec.graphed or compiled_on_cpu or register in (None, "0"):
        return None
    name = expandable_segments_setting(spec.environment)
    if name is None:
        return None
    return f"environment.{name}={spec.environment[name]} with {REGISTER}={register}"


def compiled_pipeline(spec: RunSpec) -> str | None:
    """torch_compile and training.compile=whole compile a model that is whole on its rank: pp=1."""
    if not spec.compiles_whole or spec.parallelism.pp <= 1:
        return None
    return f"{compiled_text(spec)} with parallelism.pp={spec.parallelism.pp}"


def compiled_alone(spec: RunSpec) -> str | None:
    """To the bit torch_compile is held against a twin that is compiled alike: training.compile=whole."""
    training = spec.training
    if not spec.cuda_graph.implementation.compiles or not training.deterministic or training.compile == "whole":
        return None
    return f"cuda_graph.impl=torch_compile with training.deterministic=true and training.compile={training.compile}"


def static_input_precision(spec: RunSpec) -> str | None:
    """transformer_engine captures with bf16 inputs, whatever the model's precision is."""
    if spec.cuda_graph.impl != "transformer_engine" or spec.training.precision == "bf16":
        return None
    return f"cuda_graph.impl=transformer_engine with training.precision={spec.training.precision}"


def warmup_too_short(spec: RunSpec) -> str | None:
    """Warm-up is at least 0 steps, and 1 for full_iteration and transformer_engine, so that communicators exist."""
    if spec.cuda_graph.warmup_steps >= spec.cuda_graph.implementation.least_warmup_steps:
        return None
    return f"cuda_graph.warmup_steps={spec.cuda_graph.warmup_steps} with cuda_graph.impl={spec.cuda_graph.impl}"


def _captures_experts(spec: RunSpec) -> bool:
    """Whether experts are inside a graph. torch_compile leaves them between its graphs where they wait for the host."""
    return "experts" in spec.captured_parts and not spec.cuda_graph.implementation.compiles


def _is_drop_and_pad(model: Model) -> bool:
    return model.moe_expert_capacity_factor is not None and model.moe_pad_expert_input_to_capacity


def _expert_text(spec: RunSpec) -> str:
    model, parallelism = spec.model, spec.parallelism
    pad = str(model.moe_pad_expert_input_to_capacity).lower()
    return (
        f"model.moe_expert_capacity_factor={model.moe_expert_capacity_factor}, "
        f"model.moe_pad_expert_input_to_capacity={pad}, "
        f"parallelism.dispatcher={parallelism.dispatcher}, parallelism.ep={parallelism.ep}"
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "capture.megatron_expert_sync", MEGATRON, MCORE_016, megatron_expert_sync,
        remedy="Use transformer_engine with [attn, moe_router, moe_preprocess], or set moe_expert_capacity_factor and "
        "moe_pad_expert_input_to_capacity (another task: tokens are dropped) with dispatcher alltoall, or use engine "
        "torch_native.",
        source=f"{CONFIG}:1764 (moe); {MCORE}transformer/moe/token_dispatcher.py:899, :295 and "
        "transformer/transformer_layer.py:472 (all others: accepted, die in capture)",
    ),
    Rule(
        "capture.native_expert_sync", TORCH_NATIVE, ANY, native_expert_sync,
        remedy="Set parallelism.dispatcher to allgather, or ep to 1, or capture [attn, moe_router] only, by torch or "
        "transformer_engine.",
        source="torch.distributed.all_to_all_single takes its split sizes as Python integers",
    ),
    Rule(
        "capture.native_fp32_experts", TORCH_NATIVE, ANY, native_fp32_experts,
        remedy="Set training.precision to bf16, or drop and pad (moe_expert_capacity_factor and "
        "moe_pad_expert_input_to_capacity: another task), or capture [attn, moe_router] only, by torch or transformer_engine.",
        source="torch.nn.functional.grouped_mm has no float32 kernel on CUDA that leaves offsets on the device",
    ),
    Rule(
        "capture.preprocess_sync", MEGATRON, MCORE_016, preprocess_sync,
        remedy="Set moe_pad_expert_input_to_capacity, or leave moe_expert_capacity_factor out, or capture no "
        "moe_preprocess.",
        source=f"{CONFIG}:1772; {MCORE}transformer/moe/token_dispatcher.py:512",
    ),
    Rule(
        "capture.packed_sequences", BOTH, ANY, packed_sequences,
        remedy="Set data.packed_sequences to false, or leave attention out: [moe_router, moe_preprocess], or [mlp] where layers "
        "are dense.",
        source=f"{MCORE}transformer/transformer_layer.py:1020 (TE), transformer/cuda_graphs.py:243 (local)",
    ),
    Rule(
        "capture.native_packed_whole_model", TORCH_NATIVE, ANY, native_packed_whole_model,
        remedy="Set data.packed_sequences to false, or run eager cells alone.",
        source="torch.cuda.graph: a replay repeats the shapes of the capture",
    ),
    Rule(
        "capture.full_recompute", BOTH, ANY, full_recompute,
        remedy="Set training.recompute to none, or selective on torch_native, or use full_iteration.",
        source=f"{CONFIG}:1780",
    ),
    Rule(
        "capture.cpu_offloading", BOTH, ANY, cpu_offloading,
        remedy="Set training.cpu_offloading to false.",
        source=f"{CONFIG}:1722",
    ),
    Rule(
        "capture.variable_lengths", BOTH, ANY, variable_lengths,
        remedy="Set training.variable_sequence_lengths to false and pad to training.sequence_length.",
        source=f"{MCORE}transformer/cuda_graphs.py:1256; torch.cuda.graph: a replay repeats the shapes of the capture",
    ),
    Rule(
        "capture.expandable_segments", BOTH, ANY, expandable_segments,
        remedy="Set environment.NCCL_GRAPH_REGISTER to \"0\", leave it out, or take expandable_segments:True out.",
        source=f"{MCORE}transformer/cuda_graphs.py:1682 (TE), :1413 (local, below sm_100)",
    ),
    Rule(
        "capture.compiled_pipeline", TORCH_NATIVE, ANY, compiled_pipeline,
        remedy="Set parallelism.pp to 1, or use torch or full_iteration with training.compile none or elementwise.",
        source="a stage's sends and receives break the compiled graph, so that nothing is proven of it",
    ),
    Rule(
        "capture.compiled_alone", TORCH_NATIVE, ANY, compiled_alone,
        remedy="Set training.compile to whole, in the eager twin too, or training.deterministic to false.",
        source="docs/determinism.md: Inductor's kernels round otherwise than those they replace, whatever graphs do",
    ),
    Rule(
        "capture.static_input_precision", MEGATRON, MCORE_016, static_input_precision,
        remedy="Set training.precision to bf16, or use full_iteration.",
        source=f"{MCORE}transformer/module.py:247",
    ),
    Rule(
        "capture.warmup", BOTH, ANY, warmup_too_short,
        remedy="Set cuda_graph.warmup_steps to 1 or more; 3 is Megatron's default.",
        source="NCCL user guide, Using NCCL with CUDA Graphs: a communicator's first use must come before a capture",
    ),
)  # fmt: skip
