"""Rules on the settings that engine torch_native supports."""

from __future__ import annotations

from launch.contract.spec import RunSpec
from launch.support.rule import (
    DROPOUT,
    GRAPH,
    NO_DROPOUT,
    RECOMPUTED,
    UNCOMPILED,
    NativeRule,
    Rule,
    deterministic_sinks,
    fixed,
    padded_capacity,
    spell,
)

ONE_RANK_MODEL = "parallelism.tp=1 and parallelism.pp=1 and parallelism.ep=1"
DEGREES = ("parallelism.tp", "parallelism.pp", "parallelism.ep")


def _unfit_for_backend(spec: RunSpec) -> list[str]:
    if spec.training.attention_backend == "auto":
        return []
    packed, on_cpu = spec.data.packed_sequences, spec.placement.device != "cuda"
    window, sinks = spec.model.window_size != 0, spec.model.attention_sinks
    unfit = {
        "sdpa": {"model.window_size": window, "model.attention_sinks": sinks, "data.packed_sequences": packed},
        "flex": {"placement.device": on_cpu},
        "transformer_engine": {
            "placement.device": on_cpu,
            "training.precision": spec.training.precision != "bf16",
            "data.packed_sequences": packed,
            "training.compile": spec.training.compile == "whole",
            "cuda_graph.impl": spec.cuda_graph.implementation.compiles,
        },
    }
    fields = [field for field, is_unfit in unfit.get(spec.training.attention_backend, {}).items() if is_unfit]
    return ["training.attention_backend", *fields] if fields else []


def _is_split(spec: RunSpec) -> bool:
    """Return whether a rank holds only a part of the model."""
    return (spec.parallelism.tp, spec.parallelism.pp, spec.parallelism.ep) != (1, 1, 1)


def _recomputed_across_graphs(spec: RunSpec) -> bool:
    """Return whether a recomputed module is partly inside and partly outside of a graph."""
    graph, recomputed = spec.cuda_graph, spec.training.recomputed
    across = "layernorm" in recomputed or ("moe" in recomputed and "moe_router" in graph.scope)
    return graph.implementation.takes_scope and bool(graph.scope) and across


def _mixes_draws(spec: RunSpec) -> bool:
    """Return whether the ranks of a tensor-parallel group must draw both the same numbers and different ones."""
    model, layout = spec.model, spec.parallelism
    return layout.tp > 1 and not layout.sequence_parallel and min(model.attention_dropout, model.hidden_dropout) > 0


def _drops_without_sdpa(spec: RunSpec) -> list[str]:
    """Return the fields by which attention with dropout does not run by SDPA."""
    unfit = {
        "training.attention_backend": spec.training.attention_backend not in ("auto", "sdpa"),
        "model.window_size": spec.model.window_size != 0,
        "model.attention_sinks": spec.model.attention_sinks,
        "data.packed_sequences": spec.data.packed_sequences,
    }
    fields = [field for field, is_unfit in unfit.items() if is_unfit and spec.model.attention_dropout > 0]
    return ["model.attention_dropout", *fields] if fields else []


def _on_megatron(field: str, value: object, why: str = "") -> Rule:
    """Return a rule that ``field`` has another value only on engine megatron. ``why`` is a sentence after the fix."""
    return fixed("torch_native", field, value, f"Set {field}={spell(value)}, or engine=megatron.{why}")


def _grouped_width(name: str) -> Rule:
    def is_misaligned(spec: RunSpec) -> bool:
        in_groups = spec.model.is_moe and spec.training.precision == "bf16" and spec.placement.device == "cuda"
        return in_groups and bool(getattr(spec.model, name) % 8)

    return NativeRule(
        f"torch_native.{name}", (f"model.{name}", "training.precision", "placement.device"),
        "CUDA's grouped_mm of bf16 experts needs rows whose bytes are a multiple of 16", is_misaligned,
        fix=f"Set model.{name} to a multiple of 8, or resources.device=cpu.",
    )  # fmt: skip


RULES: tuple[Rule, ...] = (
    padded_capacity("torch_native"),
    _grouped_width("hidden_size"),
    _grouped_width("moe_ffn_hidden_size"),
    fixed(
        "torch_native", "model.hybrid_override_pattern", "",
        "Set model.hybrid_override_pattern='' (every layer has attention and an MLP), or engine=megatron on a GPU, whose library "
        "has Mamba layers.",
    ),
    fixed("torch_native", "parallelism.etp", 1),
    fixed("torch_native", "cuda_graph.mend", ()),
    _on_megatron("parallelism.cp", 1),
    NativeRule(
        "torch_native.attention_backend", (),
        "sdpa has no windows, sinks or packed documents; flex and transformer_engine need CUDA; transformer_engine needs bf16 "
        "and no packed documents, and Dynamo cannot compile it with the model",
        _unfit_for_backend,
        fix="Set training.attention_backend=auto.",
        source="transformer_engine 2.11 pytorch/attention/dot_product_attention/dot_product_attention.py:798 (Dynamo)",
    ),
    deterministic_sinks("torch_native", ("transformer_engine",), "training.attention_backend=auto"),
    _on_megatron("parallelism.overlap_grad_reduce", False, " torch_native always reduces gradients during the backward pass."),
    _on_megatron("parallelism.overlap_param_gather", False),
    _on_megatron("parallelism.overlap_moe_expert_parallel_comm", False),
    _on_megatron("parallelism.delay_wgrad_compute", False),
    _on_megatron("parallelism.batch_p2p_sync", True, " torch_native never waits there."),
    NativeRule(
        "torch_native.fp8", ("training.fp8", "placement.device"), "the kernels of Transformer Engine need a GPU",
        lambda spec: spec.training.fp8 != "none" and spec.placement.device != "cuda",
        fix="Set training.fp8=none, or resources.device=cuda.",
    ),
    NativeRule(
        "torch_native.fp8", ("training.fp8", "cuda_graph.impl", "training.compile"),
        "Dynamo does not trace the modules of Transformer Engine, so the model cannot be compiled as one function",
        lambda spec: spec.training.fp8 != "none" and spec.compiles_whole,
        fix=f"Set {UNCOMPILED}, or training.fp8=none.",
        source="transformer_engine 2.11 pytorch/module/linear.py:1346 (no_torch_dynamo)",
    ),
    NativeRule(
        "torch_native.fp8", ("training.fp8", "training.recompute", "training.recompute_modules"),
        "an fp8 matrix multiplication cannot be recomputed, since its scales have changed by then; only core_attn has none",
        lambda spec: spec.training.fp8 != "none"
        and (spec.training.recompute == "full" or not spec.training.recomputed <= {"core_attn"}),
        fix="Set training.fp8=none, or training.recompute=none and training.recompute_modules=[], or engine=megatron.",
    ),
    NativeRule(
        "torch_native.fp8", ("training.fp8", "parallelism.dispatcher", "parallelism.ep"),
        "the fp8 grouped GEMM of experts takes no rows without an expert, which the allgather dispatcher adds",
        lambda spec: spec.training.fp8 != "none" and spec.parallelism.dispatcher == "allgather" and spec.parallelism.ep > 1,
        fix="Set training.fp8=none, or parallelism.dispatcher=alltoall.",
    ),
    NativeRule(
        "torch_native.fp8", ("training.fp8", "cuda_graph.impl", "cuda_graph.warmup_steps"),
        "the scales that a graph reads exist only after an eager step",
        lambda spec: spec.training.fp8 != "none" and spec.graphed and spec.cuda_graph.warmup_steps < 1,
        fix="Set cuda_graph.warmup_steps=3, or training.fp8=none.",
        source="transformer_engine 2.11 pytorch/module/base.py, prepare_forward",
    ),
    _on_megatron("training.gradient_accumulation_fusion", False),
    _on_megatron("training.moe_router_fusion", False),
    fixed("torch_native", "training.capturable_optimizer", False),
    fixed("torch_native", "training.cpu_offloading", False),
    fixed("torch_native", "training.variable_sequence_lengths", False),
    NativeRule(
        "torch_native.impl", ("cuda_graph.impl", "placement.device"), "CUDA graphs need a GPU",
        lambda spec: spec.cuda_graph.implementation.needs_cuda and spec.placement.device != "cuda",
        fix="Set cuda_graph.impl=none and cuda_graph.scope=[], or cuda_graph.impl=torch_compile and cuda_graph.scope=[], or "
        "resources.device=cuda.",
    ),
    NativeRule(
        "torch_native.impl", ("cuda_graph.impl", *DEGREES), "the collectives of a parallel model break its compiled graph",
        lambda spec: spec.cuda_graph.implementation.compiles and _is_split(spec),
        fix=f"Set {UNCOMPILED}, or {ONE_RANK_MODEL}.",
    ),
    NativeRule(
        "torch_native.compile", ("training.compile", *DEGREES), "the collectives of a parallel model break its compiled graph",
        lambda spec: spec.training.compile == "whole" and _is_split(spec),
        fix=f"Set training.compile=none, or training.compile=elementwise, or {ONE_RANK_MODEL}.",
    ),
    NativeRule(
        "torch_native.impl", (*GRAPH, "training.compile"),
        "the model is one compiled function, so no single layer or part can be captured",
        lambda spec: spec.training.compile == "whole" and spec.cuda_graph.implementation.takes_scope,
        fix="Set cuda_graph.impl=full_iteration and cuda_graph.scope=[], or training.compile=none, or training.compile=elementwise.",
    ),
    NativeRule(
        "torch_native.recompute_modules", ("training.recompute_modules", "cuda_graph.impl", "training.compile"),
        "a model that is compiled as one function can recompute only the core of attention",
        lambda spec: spec.compiles_whole and not spec.training.recomputed <= {"core_attn"},
        fix=f"Set {UNCOMPILED}, or training.recompute_modules=[].",
    ),
    NativeRule(
        "torch_native.recompute_modules", ("training.recompute_modules", *GRAPH),
        "a captured part passes its norm or routing to later code, which cannot recompute it",
        _recomputed_across_graphs,
        fix="Set cuda_graph.scope=[], or training.recompute_modules=[].",
    ),
    NativeRule(
        "torch_native.dropout", (), "only SDPA implements attention dropout, and it supports no windows, sinks or packed "
        "documents",
        _drops_without_sdpa,
        fix="Set training.attention_backend=auto, or model.attention_dropout=0.",
    ),
    NativeRule(
        "torch_native.dropout", (*DROPOUT, "parallelism.tp", "parallelism.sequence_parallel"),
        "a rank has one generator, but with tp above 1 hidden dropout needs equal random numbers on all ranks, and attention "
        "needs different ones",
        _mixes_draws,
        fix="Set parallelism.sequence_parallel=true, or parallelism.tp=1, or model.attention_dropout=0, or model.hidden_dropout=0, "
        "or engine=megatron.",
    ),
    NativeRule(
        "torch_native.dropout", (*DROPOUT, "cuda_graph.impl", "training.compile"),
        "Inductor draws different random numbers than eager code, so no bitwise comparison is possible",
        lambda spec: spec.model.draws and spec.compiles_whole,
        fix=f"Set {UNCOMPILED}, or {NO_DROPOUT}.",
        source="torch/_inductor/config.py, fallback_random",
    ),
    NativeRule(
        "torch_native.dropout", (*DROPOUT, *RECOMPUTED),
        "recomputation resets the generator: older releases of PyTorch forbid that in a capture, and newer ones are untested",
        lambda spec: spec.training.draws_again(spec.model) and "attention" in spec.captured_parts,
        fix=f"Set training.recompute=none and training.recompute_modules=[], or {NO_DROPOUT}.",
        source="pytorch/pytorch issues 83148 and 162504: Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture",
    ),
    NativeRule(
        "torch_native.layer_check_steps", ("layer_check_steps", "cuda_graph.impl", "training.compile"),
        "a model that is compiled as one function does not show the outputs of its layers",
        lambda spec: bool(spec.layer_check_steps) and spec.compiles_whole,
        fix=f"Set {UNCOMPILED}.",
    ),
)  # fmt: skip
