"""Test that each rule rejects what it should and nothing else, and that none fails on nonsense."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.contract.spec import (
    SECTIONS,
    Command,
    CudaGraph,
    Data,
    Fault,
    Model,
    Parallelism,
    Placement,
    RunSpec,
    Training,
)
from launch.support import unsupported
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load
from orchestrator.rules import RULES, refusals, violations

ROOT = Path(__file__).parents[4]
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))

DENSE = Model(num_layers=4, num_attention_heads=8, num_query_groups=4)
MOE = dataclasses.replace(DENSE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64)
ONE_EXPERT = dataclasses.replace(MOE, num_moe_experts=1, moe_router_topk=1, moe_router_normalize_topk=False)
PADDED = dataclasses.replace(MOE, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
MIXED = dataclasses.replace(MOE, moe_layer_freq=2)
HYBRID = dataclasses.replace(DENSE, hybrid_override_pattern="M*-M", hidden_size=256)
SCALED = dataclasses.replace(DENSE, rope_original_max_position=4096)
BF16 = Training(precision="bf16")
PACKED = Data(packed_sequences=True, eod_token=0)


def spec(**changes: Any) -> RunSpec:
    """Return a legal spec with ``changes``."""
    return changed(RunSpec(model=DENSE, training=BF16), **changes)


def changed(value: RunSpec, **changes: Any) -> RunSpec:
    """Return ``value`` with ``changes``. Dotted keys, with ``__`` for the dot, name a field of a section."""
    for key, item in changes.items():
        section, _, name = key.partition("__")
        inner = dataclasses.replace(getattr(value, section), **{name: item}) if name else item
        value = dataclasses.replace(value, **{section: inner})
    return value


def graphed(impl: str, *scope: str, **changes: Any) -> RunSpec:
    graph = CudaGraph(impl=impl, scope=scope)  # type: ignore[arg-type]
    return spec(cuda_graph=graph, **changes)


def on_ranks(ranks: int, **degrees: Any) -> dict[str, Any]:
    """Return a layout and a placement that fits it."""
    rest = {name: degrees.get(name, 1) for name in ("tp", "pp", "cp")}
    degrees.setdefault("dp", ranks // (rest["tp"] * rest["pp"] * rest["cp"]))
    return {"parallelism": Parallelism(**degrees), "placement": Placement(ranks_per_node=ranks)}


def violated(value: RunSpec) -> set[str]:
    return {reason.rule for reason in violations(value)}


TE = "transformer_engine"
TP2_MOE = on_ranks(2, tp=2, sequence_parallel=True)
BESIDE = {"ep": 2, "overlap_moe_expert_parallel_comm": True}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
REGISTERED = {"NCCL_GRAPH_REGISTER": "1"}
M = {"engine": "megatron"}
M_0_19 = {"engine": "megatron", "megatron_core": "0.19"}
ON_CUDA = Placement(device="cuda")

VIOLATIONS: Mapping[str, tuple[RunSpec, ...]] = {
    "scope.impl_engine": (graphed("local"), graphed("torch", **M), graphed("torch_compile", **M)),
    "scope.unknown": (graphed(TE, "atn"), graphed(TE, "full_iteration", **M), graphed(TE, "atn", engine="command")),
    "scope.not_taken": (graphed("none", "attn"), graphed("torch_compile", "attn"), graphed("full_iteration", "mlp")),
    "scope.optimizer": (
        dataclasses.replace(graphed("torch"), cuda_graph=CudaGraph("torch", optimizer=True)),
        dataclasses.replace(graphed(TE, **M), cuda_graph=CudaGraph(TE, optimizer=True)),
    ),
    "scope.duplicate": (graphed(TE, "attn", "attn"),),
    "scope.moe_and_router": (
        graphed(TE, "moe", "moe_router", model=MOE),
        graphed(TE, "moe", "moe_router", model=PADDED, **M),
        graphed(TE, "moe", "moe_router", engine="command"),
    ),
    "scope.preprocess_without_router": (graphed(TE, "attn", "moe_preprocess", model=MOE, **M),),
    "scope.moe_on_dense": (
        graphed(TE, "moe_router"),
        graphed(TE, "moe"),
        graphed(TE, "attn", "moe", **M),
        graphed(TE, "moe_router", model=ONE_EXPERT, **M),
    ),
    "scope.mlp_without_dense_layers": (graphed(TE, "mlp", model=MOE), graphed(TE, "attn", "mlp", model=MOE, **M)),
    "scope.mamba": (graphed(TE, "mamba"), graphed(TE, "attn", "mamba", **M)),
    "scope.attn_without_attention": (
        graphed(TE, "attn", model=dataclasses.replace(HYBRID, hybrid_override_pattern="M-MM"), **M),
    ),
    "scope.local_mlp": (
        graphed("local", "mlp", model=MIXED, **M),
        graphed("local", "attn", "mlp", model=HYBRID, **M),
    ),
    "scope.local_nothing": (graphed("local", "moe_router", model=MOE, **M), graphed("local", "moe", model=PADDED, **M)),
    "capture.megatron_expert_sync": (
        graphed(TE, model=MOE, **M),
        graphed(TE, "moe", model=MOE, **M),
        graphed("local", model=MOE, **M),
        graphed("local", "attn", model=MOE, **M),
        graphed("full_iteration", model=MOE, **M),
        graphed("full_iteration", model=dataclasses.replace(MOE, moe_expert_capacity_factor=1.0), **M),
        graphed("full_iteration", model=PADDED, parallelism__dispatcher="allgather", **M),
    ),
    "capture.native_expert_sync": (
        graphed("full_iteration", model=MOE, **on_ranks(2, ep=2)),
        graphed("torch", model=MOE, **on_ranks(2, ep=2)),
        graphed("torch", "moe", model=MOE, **on_ranks(2, ep=2)),
    ),
    "capture.preprocess_sync": (
        graphed(
            TE, "moe_router", "moe_preprocess", model=dataclasses.replace(MOE, moe_expert_capacity_factor=1.0), **M
        ),
    ),
    "capture.packed_sequences": (
        graphed(TE, data=PACKED, **M),
        graphed(TE, "attn", data=PACKED, **M),
    ),
    "capture.packed_local": (graphed("local", "attn", data=PACKED, **M),),
    "capture.packed_whole_step": (graphed("full_iteration", data=PACKED, **M),),
    "capture.packed_yarn": (
        graphed("full_iteration", model=dataclasses.replace(SCALED, rope_scaling="yarn"), data=PACKED, **M_0_19),
    ),
    "capture.native_packed_attention": (
        graphed("torch", "attn", data=PACKED),
        graphed(TE, data=PACKED),
    ),
    "capture.native_packed_compiled": (
        graphed("torch_compile", data=PACKED),
        graphed("full_iteration", training__compile="whole", data=PACKED, placement=ON_CUDA),
    ),
    "capture.native_packed_ranks": (graphed("full_iteration", data=PACKED, **on_ranks(2)),),
    "capture.native_fp32_experts": (
        graphed("full_iteration", model=MOE, training__precision="fp32", placement=Placement(device="cuda")),
        graphed("torch", "moe", model=MOE, training__precision="fp32", placement=Placement(device="cuda")),
    ),
    "capture.native_fp8_experts": (
        graphed("full_iteration", model=MOE, training__fp8="delayed"),
        graphed("torch", "moe", model=MOE, training__fp8="current"),
    ),
    "capture.full_recompute": (
        graphed(TE, "attn", training__recompute="full", **M),
        graphed("local", training__recompute="full", **M),
        graphed("torch", training__recompute="full"),
    ),
    "capture.cpu_offloading": (
        graphed(TE, "attn", training__cpu_offloading=True, **M),
        graphed("full_iteration", training__cpu_offloading=True),
    ),
    "capture.variable_lengths": (
        graphed(TE, "attn", training__variable_sequence_lengths=True, **M),
        graphed("torch_compile", training__variable_sequence_lengths=True),
    ),
    "capture.expandable_segments": (
        graphed(TE, "attn", environment=EXPANDABLE | REGISTERED),
        graphed("full_iteration", environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | REGISTERED),
        graphed("local", environment=EXPANDABLE | REGISTERED, **M),
        graphed("torch_compile", environment=EXPANDABLE | REGISTERED, placement=Placement(device="cuda")),
    ),
    "capture.compiled_pipeline": (
        graphed("torch_compile", **on_ranks(2, pp=2)),
        spec(training__compile="whole", **on_ranks(2, pp=2)),
        graphed("full_iteration", training__compile="whole", **on_ranks(2, pp=2)),
    ),
    "capture.compiled_alone": (
        graphed("torch_compile", training__deterministic=True),
        graphed("torch_compile", training=Training(compile="elementwise", deterministic=True)),
    ),
    "capture.warmup": (
        spec(cuda_graph=CudaGraph("full_iteration", warmup_steps=0)),
        spec(cuda_graph=CudaGraph("transformer_engine", ("attn",), warmup_steps=0), **M),
    ),
    "model.sizes": (
        spec(model__ffn_hidden_size=0),
        spec(model=dataclasses.replace(MOE, moe_ffn_hidden_size=0)),
        spec(model=dataclasses.replace(MOE, moe_router_topk=0)),
    ),
    "model.hybrid_override_pattern": (
        spec(model=dataclasses.replace(HYBRID, hybrid_override_pattern="M*-"), **M),
        spec(model=dataclasses.replace(HYBRID, hybrid_override_pattern="M*-E"), **M),
        spec(model=dataclasses.replace(HYBRID, hybrid_override_pattern="*-*-"), **M),
    ),
    "model.mamba_width": (spec(model=dataclasses.replace(HYBRID, hidden_size=128), **M),),
    "model.query_groups": (spec(model__num_query_groups=3),),
    "model.kv_channels": (spec(model__kv_channels=15),),
    "model.topk": (spec(model=dataclasses.replace(MOE, moe_router_topk=9)),),
    "model.padding": (spec(model=dataclasses.replace(MOE, moe_pad_expert_input_to_capacity=True)),),
    "model.rope_scaling": (spec(model__rope_scaling="yarn"),),
    "model.rope_range": (
        spec(model=dataclasses.replace(SCALED, rope_scaling="llama3", rope_high_freq_factor=1.0)),
        spec(model=dataclasses.replace(SCALED, rope_scaling="yarn", rope_beta_fast=0.5)),
        spec(model=dataclasses.replace(SCALED, rope_scaling="yarn", rotary_base=1.0)),
    ),
    "model.expert_bias": (
        spec(model=dataclasses.replace(MOE, moe_router_enable_expert_bias=True)),
        spec(model__moe_router_enable_expert_bias=True, model__moe_router_score_function="sigmoid"),
    ),
    "model.router_gradient": (
        spec(model=dataclasses.replace(MOE, moe_router_topk=1)),
        spec(
            model=dataclasses.replace(
                MOE, moe_router_topk=1, moe_router_normalize_topk=False, moe_router_order="topk_then_softmax"
            )
        ),
    ),
    "model.sigmoid": (
        spec(model=dataclasses.replace(MOE, moe_router_score_function="sigmoid", moe_router_order="topk_then_softmax")),
    ),
    "layout.world": (spec(placement__nodes=2), spec(parallelism__dp=2), spec(parallelism__dp=2, engine="command")),
    "layout.expert_world": (spec(model=MOE, **on_ranks(2, ep=4)), spec(model=MOE, **on_ranks(4, pp=4, ep=2))),
    "layout.expert_parallel_dense": (spec(**on_ranks(2, ep=2)), spec(**on_ranks(2, etp=2))),
    "layout.experts": (spec(model=dataclasses.replace(MOE, num_moe_experts=6), **on_ranks(4, ep=4)),),
    "layout.query_groups": (
        spec(**on_ranks(8, tp=8)),
        spec(model__num_query_groups=3, model__num_attention_heads=12, **on_ranks(2, tp=2), **M),
    ),
    "layout.widths": (
        spec(model__vocab_size=257, **on_ranks(2, tp=2)),
        spec(model__ffn_hidden_size=255, **on_ranks(2, tp=2)),
        spec(model=dataclasses.replace(MOE, moe_ffn_hidden_size=63), **on_ranks(2, tp=2, etp=2)),
        spec(model=dataclasses.replace(MOE, moe_shared_expert_ffn_hidden_size=63), **on_ranks(2, tp=2)),
    ),
    "layout.layers": (
        spec(model__num_layers=3, **on_ranks(2, pp=2), **M),
        spec(model__num_layers=6, **on_ranks(2, pp=2, vpp=2, schedule="interleaved"), **M),
    ),
    "layout.stages": (
        spec(model__num_layers=1, **on_ranks(2, pp=2)),
        spec(model__num_layers=3, **on_ranks(2, pp=2, vpp=2, schedule="interleaved")),
    ),
    "layout.interleaving": (
        spec(**on_ranks(2, pp=2, vpp=2)),
        spec(**on_ranks(2, pp=2, schedule="interleaved")),
        spec(parallelism__vpp=2, parallelism__schedule="interleaved"),
        spec(parallelism__vpp=2),
    ),
    "layout.interleaved_microbatches": (
        spec(training__global_batch_size=3, **on_ranks(2, pp=2, vpp=2, schedule="interleaved")),
    ),
    "layout.sequence_parallel": (spec(parallelism__sequence_parallel=True),),
    "layout.moe_sequence_parallel": (spec(model=MOE, **on_ranks(2, tp=2), **M),),
    "layout.sequence_length": (
        spec(training__sequence_length=130, **on_ranks(2, cp=2)),
        spec(training__sequence_length=127, **on_ranks(2, tp=2, sequence_parallel=True)),
        spec(model=MOE, training__sequence_length=127, **on_ranks(2, tp=2)),
    ),
    "layout.biased_experts": (
        spec(
            model=dataclasses.replace(MOE, add_bias_linear=True),
            **on_ranks(2, tp=2, etp=2, sequence_parallel=True),
            **M,
        ),
    ),
    "overlap.param_gather": (
        spec(parallelism__overlap_param_gather=True, **M),
        spec(parallelism=Parallelism(overlap_param_gather=True, distributed_optimizer=True), **M),
        spec(parallelism=Parallelism(overlap_param_gather=True, overlap_grad_reduce=True), **M),
    ),
    "overlap.expert_exchange": (
        spec(model=MOE, **on_ranks(1, overlap_moe_expert_parallel_comm=True), **M),
        spec(model=MOE, **on_ranks(2, **BESIDE, dispatcher="allgather"), **M),
        spec(model=MOE, training__precision="fp32", **on_ranks(2, **BESIDE), **M),
        spec(model=MOE, training__recompute="full", **on_ranks(2, **BESIDE), **M),
        spec(model=MOE, **on_ranks(4, pp=2, **BESIDE), **M),
    ),
    "overlap.expert_exchange_captured": (
        graphed("full_iteration", model=PADDED, **on_ranks(2, **BESIDE), **M),
        graphed("local", model=PADDED, **on_ranks(2, **BESIDE), **M),
        graphed(TE, model=PADDED, **on_ranks(2, **BESIDE), **M),
        graphed(TE, "attn", "moe", model=PADDED, **on_ranks(2, **BESIDE), **M),
        graphed(TE, "mlp", model=MIXED, **on_ranks(2, **BESIDE), **M),
    ),
    "overlap.delayed_wgrad": (spec(model=MOE, **on_ranks(2, ep=2, delay_wgrad_compute=True), **M),),
    "overlap.delayed_wgrad_captured": (
        graphed(TE, "attn", model=MOE, **on_ranks(2, **BESIDE, delay_wgrad_compute=True), **M),
        graphed(
            TE,
            "moe_router",
            model=dataclasses.replace(MOE, moe_shared_expert_ffn_hidden_size=16),
            **on_ranks(2, **BESIDE, delay_wgrad_compute=True),
            **M,
        ),
    ),
    "training.schedule": (spec(training__min_learning_rate=1.0), spec(training__learning_rate_warmup_steps=101)),
    "training.batch": (spec(training__global_batch_size=7, training__micro_batch_size=2),),
    "training.recompute_modules": (
        spec(training__recompute_modules=("mlp",)),
        spec(training__recompute="full", training__recompute_modules=("mlp",), **M),
    ),
    "training.recompute_names": (
        spec(training__recompute="selective", training__recompute_modules=("mlp", "mlp")),
        spec(training__recompute="selective", training__recompute_modules=("attn",)),
        spec(model=MOE, training__recompute="selective", training__recompute_modules=("moe", "moe_act")),
    ),
    "training.recompute_absent": (
        spec(training__recompute="selective", training__recompute_modules=("moe",)),
        spec(model=MOE, training__recompute="selective", training__recompute_modules=("mlp",)),
        spec(model=MOE, training__recompute="selective", training__recompute_modules=("shared_experts",), **M),
    ),
    "training.recompute_fp8": (
        spec(
            model=MOE,
            training__fp8="delayed",
            training__precision="bf16",
            training__recompute="selective",
            training__recompute_modules=("layernorm",),
            **M,
        ),
    ),
    "training.window": (
        spec(training__steps=6),
        spec(cuda_graph__warmup_steps=97),
        spec(cuda_graph__warmup_steps=97, engine="command"),
    ),
    "training.gradient_precision": (spec(training=Training(gradient_precision="bf16")),),
    "training.optimizer_precision": (
        spec(training=Training(optimizer_precision="lean")),
        spec(training=Training(optimizer_precision="lean"), **on_ranks(2, dp=2, distributed_optimizer=True), **M),
    ),
    "training.lean_moments": (
        spec(training__optimizer_precision="lean", training__precision="bf16", training__adam_beta2=0.999),
        spec(training__optimizer_precision="lean", training__precision="bf16", training__adam_beta1=0.997),
    ),
    "training.fp8_precision": (
        spec(training=Training(fp8="delayed"), **M),
        spec(training=Training(fp8="delayed"), placement=Placement(device="cuda")),
    ),
    "training.fp8_weight_caching": (spec(training__fp8_weight_caching=False),),
    "training.fp8_sizes": (
        spec(training__fp8="current", training__sequence_length=120, **M),
        spec(training__fp8="current", model__ffn_hidden_size=72, **M),
        spec(training__fp8="delayed", model__hidden_size=72, **M),
        spec(training__fp8="delayed", model__num_query_groups=1, model__kv_channels=12, **M),
        spec(training__fp8="delayed", model=dataclasses.replace(MOE, moe_ffn_hidden_size=24), **M),
        spec(training__fp8="delayed", model=dataclasses.replace(MOE, moe_shared_expert_ffn_hidden_size=24), **M),
        spec(training__fp8="delayed", model__ffn_hidden_size=48, **on_ranks(2, tp=2), **M),
        spec(
            training__fp8="delayed",
            training__sequence_length=80,
            **on_ranks(4, tp=4, sequence_parallel=True),
            **M,
        ),
    ),
    "training.deterministic_kernels": (
        spec(training__deterministic=True, environment={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, **M),
    ),
    "data.unused_field": (
        spec(data=Data(kind="synthetic", path="somewhere")),
        spec(data=Data(kind="indexed", path="somewhere", tokenizer="some")),
    ),
    "data.path": (spec(data=Data(path="")), spec(data=Data(tokenizer="a\0b"))),
    "data.indexed_path": (spec(data=Data(kind="indexed")),),
    "data.byte_tokens": (spec(model__vocab_size=255),),
    "data.eod_token": (spec(data=Data(eod_token=256)), spec(data=Data(eod_token=-1))),
    "data.packing": (spec(data=Data(packed_sequences=True)),),
    "data.max_documents": (spec(data=Data(eod_token=0, max_documents=8)),),
    "fault.step": (
        spec(fault=Fault("nan", 0)),
        spec(fault=Fault("hang", 100)),
        spec(fault=Fault("dynamic_shape", 3), placement=ON_CUDA),
        graphed("full_iteration", fault=Fault("input_freed", 3), placement=ON_CUDA),
    ),
    "fault.device": (spec(fault=Fault("oom_eager")), graphed("full_iteration", fault=Fault("item_in_capture"))),
    "fault.hooks": (
        graphed("torch_compile", fault=Fault("item_in_capture"), placement=ON_CUDA),
        graphed("torch_compile", fault=Fault("frozen_scalar"), placement=ON_CUDA),
        graphed("full_iteration", training__compile="whole", fault=Fault("item_in_capture"), placement=ON_CUDA),
        spec(training__compile="whole", fault=Fault("frozen_scalar"), placement=ON_CUDA),
    ),
}

LEGAL: Mapping[str, RunSpec] = {
    "a router of one expert": graphed(TE, "moe_router", model=ONE_EXPERT),
    "eager": spec(),
    "eager with what graphs forbid": spec(
        training__cpu_offloading=True, training__recompute="full", data=PACKED, environment=EXPANDABLE
    ),
    "router scopes of a dropless mixture of experts": graphed(TE, "attn", "moe_router", "moe_preprocess", model=MOE, **M),
    "experts padded to capacity": graphed(TE, "moe", model=PADDED, **M),
    "whole step, padded": graphed("full_iteration", model=PADDED, **M),
    "whole layer, dense, local": graphed("local", **M),
    "preprocessing, padded": graphed(TE, "moe_router", "moe_preprocess", model=PADDED, **M),
    "mlp where some layers are dense": graphed(TE, "attn", "mlp", "moe_router", model=MIXED, **M),
    "whole step, dropless, one expert rank": graphed("full_iteration", model=MOE),
    "whole step, dropless, allgather": graphed("full_iteration", model=MOE, **on_ranks(2, ep=2, dispatcher="allgather")),
    "attention beside all-to-all": graphed("torch", "attn", "moe_router", model=MOE, **on_ranks(2, ep=2)),
    "packed, attention outside": graphed(TE, "moe_router", "moe_preprocess", model=MOE, data=PACKED, **M),
    "packed, whole step on megatron": graphed("full_iteration", data=PACKED, **M_0_19),
    "packed, whole step on torch_native": graphed("full_iteration", data=PACKED, training__compile="elementwise"),
    "whole step, fp32 experts padded": graphed(
        "full_iteration", model=PADDED, training__precision="fp32", placement=Placement(device="cuda")
    ),
    "sigmoid routing steered": spec(
        model=dataclasses.replace(MOE, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    ),
    "full recompute in a whole step": graphed("full_iteration", training__recompute="full", **M),
    "selective recompute in a scope": graphed(TE, "attn", training__recompute="selective", **M),
    "registration left to the engine": graphed(TE, "attn", environment=EXPANDABLE),
    "registration off": graphed(TE, "attn", environment=EXPANDABLE | {"NCCL_GRAPH_REGISTER": "0"}, **M),
    "segments not expandable": graphed(TE, environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, **M),
    "an allocator that no CPU run meets": graphed("torch_compile", environment=EXPANDABLE | REGISTERED),
    "no warm-up for torch_compile": spec(cuda_graph=CudaGraph("torch_compile", warmup_steps=0)),
    "shortest run": spec(training__steps=7),
    "a fault that is not set": spec(fault=Fault("none", -1)),
    "compiled whole": graphed("full_iteration", training__compile="whole", placement=ON_CUDA),
    "compiled whole, with a fault of the step": spec(training__compile="whole", fault=Fault("nan", 1)),
    "a fault of any device": graphed("torch_compile", fault=Fault("nan", 1)),
    "a fault of the first replay after the capture's own": graphed(
        "full_iteration", fault=Fault("oom_replay", 4), placement=ON_CUDA
    ),
    "layers that the stages do not divide": spec(model__num_layers=3, **on_ranks(2, pp=2)),
    "interleaved": spec(**on_ranks(2, pp=2, vpp=2, schedule="interleaved")),
    "mixture of experts with tensor parallelism": spec(model=MOE, **TP2_MOE, **M),
    "exchanges beside passes": spec(
        parallelism=Parallelism(overlap_param_gather=True, overlap_grad_reduce=True, distributed_optimizer=True), **M
    ),
    "torch_native in 8 bits, experts with a capacity captured": graphed(
        "full_iteration", training__fp8="delayed", training__fp8_weight_caching=False, model=PADDED
    ),
    "torch_native in 8 bits, routers captured": graphed(TE, "attn", "moe_router", training__fp8="current", model=MOE),
    "in 8 bits": spec(training__fp8="delayed", model=MOE, **TP2_MOE, **M),
    "in 8 bits, graphed": graphed("full_iteration", training__fp8="current", model=PADDED, **M),
    "8 tokens over each tensor-parallel rank": spec(training__fp8="delayed", training__sequence_length=16, **TP2_MOE, **M),
    "experts' exchange beside computations": graphed(
        TE, "attn", "moe_router", "moe_preprocess", model=MOE, **on_ranks(2, **BESIDE), **M
    ),
    "weights' gradients behind": graphed(
        TE, "moe_router", "moe_preprocess", model=MOE, **on_ranks(2, **BESIDE, delay_wgrad_compute=True), **M
    ),
    "experts' exchange of interleaved stages": spec(
        model=MOE, **on_ranks(4, pp=2, vpp=2, schedule="interleaved", **BESIDE), **M
    ),
    "compiled beside a twin that is not, within margins": graphed("torch_compile"),
    "compiled beside a twin that is, to the bit": graphed(
        "torch_compile", training__deterministic=True, training__compile="whole"
    ),
    "deterministic kernels, asked for": spec(
        training__deterministic=True, environment={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}, **M
    ),
    "kernels that are not deterministic": spec(environment={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, **M),
    "reduced in the backward pass alone": spec(parallelism__overlap_grad_reduce=True, **M),
    "expert ranks across tensor and data ranks": spec(
        model=MOE, **on_ranks(8, tp=2, dp=4, ep=8, sequence_parallel=True), **M
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "value"), [(rule, value) for rule, values in VIOLATIONS.items() for value in values])
def test_a_violation_is_rejected_by_its_rule(rule: str, value: RunSpec) -> None:
    assert rule in violated(value)


@pytest.mark.parametrize("rule", [rule.id for rule in RULES])
def test_every_rule_has_a_spec_that_violates_it_alone(rule: str) -> None:
    assert {rule} in [violated(value) for value in VIOLATIONS[rule]]


@pytest.mark.parametrize("name", LEGAL)
def test_what_can_work_is_let_through(name: str) -> None:
    assert violations(LEGAL[name]) == ()


def test_all_violated_rules_are_reported_in_the_order_of_the_table() -> None:
    value = graphed(
        TE, "moe", "moe_router", model=MOE, training__recompute="full", training__steps=3, parallelism__tp=3, **M
    )
    found = [reason.rule for reason in violations(value)]
    assert found == [rule.id for rule in RULES if rule.id in set(found)]
    assert {
        "scope.moe_and_router",
        "capture.full_recompute",
        "layout.query_groups",
        "layout.world",
        "training.window",
    } <= set(found)


def test_the_refusal_of_an_implementation_lists_what_each_engine_has() -> None:
    reason = next(one for one in violations(graphed("local")) if one.rule == "scope.impl_engine")
    assert (
        "torch_native has torch_compile, torch, transformer_engine and full_iteration, and megatron has "
        in reason.message
    )


def test_a_message_holds_the_values_and_what_must_hold() -> None:
    (reason,) = violations(graphed(TE, "moe_ruoter", model=MOE, **M))
    assert reason.message == (
        "cuda_graph.scope=[moe_ruoter], but each scope must be one of attn, mlp, moe, moe_router, moe_preprocess, mamba"
    )
    (reason,) = violations(spec(training__global_batch_size=9, training__micro_batch_size=2, **on_ranks(1)))
    assert "9" in reason.message and "micro_batch_size=2" in reason.message and "dp=1" in reason.message


def test_a_message_names_what_is_at_fault_and_nothing_else() -> None:
    beside = {"ep": 2, "pp": 2, "dp": 2, "overlap_moe_expert_parallel_comm": True}
    (reason,) = violations(spec(model=MOE, training=BF16, **on_ranks(4, **beside), **M))
    assert reason.message.partition(", but ")[0] == (
        "parallelism.overlap_moe_expert_parallel_comm=true, parallelism.vpp=1"
    )
    shared = dataclasses.replace(MOE, moe_shared_expert_ffn_hidden_size=16)
    delayed = on_ranks(2, **BESIDE, delay_wgrad_compute=True)
    for model, scope, named in ((MOE, "attn", False), (shared, "attn", False), (shared, "moe_router", True)):
        (reason,) = violations(graphed(TE, scope, model=model, **delayed, **M))
        assert ("model.moe_shared_expert_ffn_hidden_size=16" in reason.message) is named


FIXES: Mapping[str, tuple[RunSpec, str, Mapping[str, Any]]] = {
    "scope.not_taken": (
        graphed("full_iteration", "attn", **M), "or cuda_graph.impl=transformer_engine", {"cuda_graph__impl": TE}
    ),
    "capture.native_expert_sync": (
        graphed("full_iteration", model=MOE, **on_ranks(2, ep=2)),
        "cuda_graph.impl=torch and cuda_graph.scope=[attn, moe_router]",
        {"cuda_graph": CudaGraph("torch", ("attn", "moe_router"))},
    ),
    "layout.interleaving": (
        spec(**M, **on_ranks(2, pp=2, schedule="interleaved")), "parallelism.schedule=1f1b", {"parallelism__schedule": "1f1b"}
    ),
    "megatron.yarn_positions": (
        graphed(TE, "attn", **M, model=dataclasses.replace(SCALED, rope_scaling="yarn")),
        "or cuda_graph.scope=[mlp]",
        {"cuda_graph__scope": ("mlp",)},
    ),
    "megatron.recompute": (
        graphed(TE, "attn", **M, model=MOE, training=dataclasses.replace(BF16, recompute="selective")),
        "[moe_router, moe_preprocess]",
        {"cuda_graph__scope": ("moe_router", "moe_preprocess")},
    ),
    "layout.biased_experts": (
        spec(
            **M, model=dataclasses.replace(MOE, add_bias_linear=True), **on_ranks(2, tp=2, etp=2, sequence_parallel=True)
        ),
        "or model.add_bias_linear=false",
        {"model__add_bias_linear": False},
    ),
    "megatron.tp": (
        spec(**M, model=dataclasses.replace(MOE, add_bias_linear=True), **on_ranks(2, tp=2, sequence_parallel=True)),
        "or parallelism.tp=1",
        {"parallelism": Parallelism(dp=2)},
    ),
}  # fmt: skip
"""A cell, words of its fix, and the changes that the fix asks for."""


@pytest.mark.parametrize("rule", FIXES)
def test_a_fix_leads_to_a_cell_that_its_engine_runs(rule: str) -> None:
    value, said, changes = FIXES[rule]
    value = changed(value, placement__device="cuda")
    (reason,) = (*violations(value), *unsupported(value))
    assert reason.rule == rule and said in reason.remedy
    out = changed(value, **changes)
    assert (*violations(out), *unsupported(out)) == ()


def test_no_fix_leads_to_what_an_engine_always_refuses() -> None:
    """launch.support rejects the local graphs of megatron, and only megatron has them."""
    assert not [rule.id for rule in RULES if re.search(r"\blocal\b", rule.fix)]


def test_rules_are_named_once_and_say_what_holds_what_to_do_and_where_it_comes_from() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.engines and rule.versions and rule.fix and rule.source, rule.id
        assert rule.statement and not rule.statement.endswith("."), rule.id


EAGER_ALONE = {"tiny_parallel.yaml"}
REJECTED_ON_PURPOSE = {
    "tiny_moe.yaml": {"scope.moe_and_router", "capture.native_fp32_experts"},
    "gpt_oss_20b.yaml": {"capture.megatron_expert_sync", "layout.interleaved_microbatches"},
    "qwen3_8l_megatron.yaml": {"capture.megatron_expert_sync"},
    "packed_sequences.yaml": {"capture.packed_sequences"},
    "gpt_oss_5l_megatron.yaml": {"capture.megatron_expert_sync"},
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_has_cells_that_run_and_only_the_rejections_it_means(name: str) -> None:
    specs = [cell.spec for cell in expand(load(ROOT / "recipes" / name), "cuda")]
    graphed = name not in EAGER_ALONE
    assert any(value.graphed == graphed and not violations(value) and not unsupported(value) for value in specs)
    assert set().union(*map(violated, specs)) == REJECTED_ON_PURPOSE.get(name, set())


# --- properties ------------------------------------------------------------------------------------------------------

INTEGERS = st.one_of(st.integers(-2, 9), st.sampled_from([64, 128, 10**30, -(10**30)]))
WORDS = st.sampled_from(
    ["none", "local", TE, "torch", "torch_compile", "full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess",
     "interleaved", "alltoall", "allgather", "full", "bf16", "text", "yarn", "megatron", "torch_native", "", "nonsense"]
)  # fmt: skip
BY_TYPE: Mapping[str, st.SearchStrategy[Any]] = {
    "int": INTEGERS,
    "float": st.floats(),
    "bool": st.booleans(),
    "str": WORDS,
    "float | None": st.none() | st.floats(),
    "int | None": st.none() | st.integers(-3, 300),
    "str | None": st.none() | WORDS,
    "tuple[str, ...]": st.lists(WORDS, max_size=4).map(tuple),
    "GraphImpl": WORDS,
    "FrameworkName": WORDS,
    "Launcher": WORDS,
    "Device": WORDS,
}


def arbitrary(section: type) -> st.SearchStrategy[Any]:
    """Draw any value in every field. Fields with a closed set of values may get any text."""
    fields = {
        field.name: WORDS if str(field.type).startswith("Literal") else BY_TYPE[str(field.type)]
        for field in dataclasses.fields(section)
    }
    return st.fixed_dictionaries(fields).map(lambda values: section(**values))


SPECS = st.builds(
    RunSpec,
    engine=st.sampled_from(["torch_native", "megatron"]),
    environment=st.dictionaries(
        st.sampled_from(["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER"]),
        st.sampled_from(["expandable_segments:True", "0", "1", "", ",:,"]),
    ),
    repeat=st.just(0),
    fault=st.builds(Fault, st.sampled_from(["none", "nan", "oom_replay", "frozen_scalar", "nonsense"]), INTEGERS),
    **{name: arbitrary(section) for name, section in SECTIONS.items() if name != "fault"},
)


@settings(max_examples=120)
@given(SPECS)
def test_judging_never_fails_and_every_reason_says_all(value: RunSpec) -> None:
    for reason in violations(value):
        assert reason.message and reason.remedy and reason.source


@settings(max_examples=100)
@given(SPECS)
def test_an_eager_twin_violates_nothing_that_its_graphed_cell_does_not(value: RunSpec) -> None:
    twin = dataclasses.replace(value, cuda_graph=CudaGraph(warmup_steps=value.cuda_graph.warmup_steps))
    assert violated(twin) <= violated(value)


@pytest.mark.parametrize(
    ("graph", "rule"),
    [
        (CudaGraph("torch_compile", ("attn",)), "scope.not_taken"),
        (CudaGraph("torch_compile", optimizer=True), "command.optimizer"),
    ],
)
def test_a_users_program_has_no_flag_for_what_its_graphs_would_ignore(graph: CudaGraph, rule: str) -> None:
    command = Command("huggingface", "train.py")
    assert [reason.rule for reason in refusals(RunSpec(engine="command", command=command, cuda_graph=graph))] == [rule]
