"""Test what each engine rejects: every field that it would otherwise ignore."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from launch.contract.spec import (
    CudaGraph,
    Data,
    EngineName,
    MegatronCore,
    Model,
    Parallelism,
    Placement,
    RunSpec,
    Training,
    spec_from_json,
    spec_to_json,
)
from launch.support import SUPPORT, known_faults, megatron, unsupported
from launch.support.rule import RELEASES, spell
from orchestrator.plan.sound_fixes import alternatives, apply, keep_sound_fixes

MOE = Model(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16)
SINKS = dataclasses.replace(MOE, attention_sinks=True, window_size=8)
PACKED = Data(packed_sequences=True, eod_token=0)
PADDED = dataclasses.replace(PACKED, max_documents=32)

REFUSED = {
    "model.hybrid_override_pattern": "M*",
    "model.moe_expert_capacity_factor": 1.0,
    "parallelism.etp": 2,
    "parallelism.cp": 2,
    "parallelism.overlap_grad_reduce": True,
    "parallelism.overlap_param_gather": True,
    "parallelism.overlap_moe_expert_parallel_comm": True,
    "parallelism.delay_wgrad_compute": True,
    "parallelism.batch_p2p_sync": False,
    "training.attention_backend": "flex",
    "training.fp8": "delayed",
    "training.gradient_accumulation_fusion": True,
    "training.moe_router_fusion": True,
    "training.capturable_optimizer": True,
    "training.cpu_offloading": True,
    "training.variable_sequence_lengths": True,
    "cuda_graph.impl": "full_iteration",
}


def with_field(spec: RunSpec, field: str, value: Any) -> RunSpec:
    content = spec_to_json(spec)
    section, name = field.split(".")
    content[section] = {**content[section], name: value}
    return spec_from_json(content)


@pytest.mark.parametrize(("field", "value"), REFUSED.items())
def test_refusal_names_the_field_its_value_and_the_way_out(field: str, value: Any) -> None:
    (reason,) = unsupported(with_field(RunSpec(model=MOE), field, value))
    assert reason.rule == f"torch_native.{field.split('.')[1]}"
    assert f"{field}={spell(value)}" in reason.message
    assert reason.remedy


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(),
        RunSpec(model=dataclasses.replace(MOE, moe_layer_freq=2, moe_z_loss_coeff=1e-3), parallelism=Parallelism(dp=4)),
        RunSpec(cuda_graph=CudaGraph(impl="torch_compile")),
        RunSpec(cuda_graph=CudaGraph(impl="torch_compile"), training=Training(compile="whole"), model=MOE),
        RunSpec(cuda_graph=CudaGraph(impl="torch_compile"), placement=Placement(device="cuda")),
        RunSpec(cuda_graph=CudaGraph(impl="torch", scope=("attn",)), placement=Placement(device="cuda")),
        RunSpec(cuda_graph=CudaGraph(impl="full_iteration"), placement=Placement(device="cuda")),
        RunSpec(training=Training(precision="bf16"), placement=Placement(device="cuda"), model=MOE),
        RunSpec(training=Training(precision="fp32"), placement=Placement(device="cuda"), model=MOE),
        RunSpec(training=Training(attention_backend="flex"), placement=Placement(device="cuda"), data=PACKED),
        RunSpec(
            training=Training(attention_backend="transformer_engine", precision="bf16"),
            placement=Placement(device="cuda"),
            model=SINKS,
        ),
        RunSpec(training=Training(recompute="full", compile="elementwise"), model=SINKS, data=PACKED),
        RunSpec(model=dataclasses.replace(MOE, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)),
    ],
)
def test_what_it_can_do_is_not_refused(spec: RunSpec) -> None:
    assert unsupported(spec) == ()


@pytest.mark.parametrize(
    ("spec", "rules"),
    [
        (
            RunSpec(model=dataclasses.replace(MOE, moe_ffn_hidden_size=12), training=Training(precision="bf16")),
            ["torch_native.moe_ffn_hidden_size"],
        ),
    ],
)
def test_some_limits_hold_on_cuda_alone(spec: RunSpec, rules: list[str]) -> None:
    assert unsupported(spec) == ()
    on_cuda = dataclasses.replace(spec, placement=Placement(device="cuda"))
    assert [reason.rule for reason in unsupported(on_cuda)] == rules


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(model=SINKS, training=Training(attention_backend="sdpa")),
        RunSpec(data=PACKED, training=Training(attention_backend="sdpa")),
        RunSpec(
            data=PACKED,
            training=Training(attention_backend="transformer_engine", precision="bf16"),
            placement=Placement(device="cuda"),
        ),
        RunSpec(training=Training(attention_backend="transformer_engine"), placement=Placement(device="cuda")),
        RunSpec(
            training=Training(attention_backend="transformer_engine", precision="bf16", compile="whole"),
            placement=Placement(device="cuda"),
        ),
        RunSpec(
            training=Training(attention_backend="transformer_engine", precision="bf16"),
            cuda_graph=CudaGraph("torch_compile"),
            placement=Placement(device="cuda"),
        ),
    ],
)
def test_a_backend_that_cannot_express_the_layers_is_refused(spec: RunSpec) -> None:
    assert [reason.rule for reason in unsupported(spec)] == ["torch_native.attention_backend"]
    auto = dataclasses.replace(spec, training=dataclasses.replace(spec.training, attention_backend="auto"))
    assert unsupported(auto) == ()


DROPS_BOTH = Model(attention_dropout=0.1, hidden_dropout=0.1)
BF16_EAGER, MLP_AGAIN = Training(precision="bf16"), Training(recompute="selective", recompute_modules=("mlp",))
FULL, CORE = Training(recompute="full"), Training(recompute="selective")
WITHIN_EXPERTS = Training(recompute="selective", recompute_modules=("moe_act",))
ATTENTION_GRAPH, STEP_GRAPH = CudaGraph("torch", ("attn",)), CudaGraph("full_iteration")


@pytest.mark.parametrize(
    ("spec", "is_refused"),
    [
        (RunSpec(model=DROPS_BOTH, training=FULL), False),
        (RunSpec(model=DROPS_BOTH, cuda_graph=STEP_GRAPH), False),
        (RunSpec(model=dataclasses.replace(SINKS, hidden_dropout=0.1), data=PACKED), False),
        (RunSpec(model=dataclasses.replace(SINKS, attention_dropout=0.1)), True),
        (RunSpec(model=DROPS_BOTH, data=PACKED), True),
        (RunSpec(model=DROPS_BOTH, training=Training(attention_backend="flex")), True),
        (RunSpec(model=DROPS_BOTH, parallelism=Parallelism(tp=2)), True),
        (RunSpec(model=DROPS_BOTH, parallelism=Parallelism(tp=2, sequence_parallel=True)), False),
        (RunSpec(model=Model(hidden_dropout=0.1), parallelism=Parallelism(tp=2)), False),
        (RunSpec(model=Model(attention_dropout=0.1), parallelism=Parallelism(tp=2)), False),
        (RunSpec(model=Model(hidden_dropout=0.1), training=Training(compile="whole")), True),
        (RunSpec(model=Model(hidden_dropout=0.1), cuda_graph=CudaGraph("torch_compile")), True),
        (RunSpec(model=Model(hidden_dropout=0.1), training=FULL, cuda_graph=STEP_GRAPH), True),
        (RunSpec(model=Model(hidden_dropout=0.1), training=CORE, cuda_graph=STEP_GRAPH), False),
        (RunSpec(model=DROPS_BOTH, training=CORE, cuda_graph=ATTENTION_GRAPH), True),
        (RunSpec(model=DROPS_BOTH, training=CORE, cuda_graph=CudaGraph("torch", ("mlp",))), False),
        (RunSpec(model=dataclasses.replace(MOE, hidden_dropout=0.1), training=WITHIN_EXPERTS, cuda_graph=STEP_GRAPH), False),
    ],
)  # fmt: skip
def test_dropout_is_refused_where_draws_cannot_be_repeated(spec: RunSpec, is_refused: bool) -> None:
    rules = {reason.rule for reason in unsupported(dataclasses.replace(spec, placement=Placement(device="cuda")))}
    assert ("torch_native.dropout" in rules) is is_refused
    assert rules <= {"torch_native.dropout", "torch_native.attention_backend"}


@pytest.mark.parametrize(
    ("model", "training", "graph", "is_refused"),
    [
        (DROPS_BOTH, BF16_EAGER, CudaGraph("full_iteration"), False),
        (Model(hidden_dropout=0.1), FULL, CudaGraph(), True),
        (Model(hidden_dropout=0.1), CORE, CudaGraph(), False),
        (Model(attention_dropout=0.1), CORE, CudaGraph(), True),
        (Model(hidden_dropout=0.1), MLP_AGAIN, CudaGraph("full_iteration"), True),
        (Model(hidden_dropout=0.1), MLP_AGAIN, CudaGraph(), False),
    ],
)
def test_megatron_recomputes_no_dropout(model: Model, training: Training, graph: CudaGraph, is_refused: bool) -> None:
    spec = RunSpec("megatron", model=model, training=training, cuda_graph=graph, placement=Placement(device="cuda"))
    assert ({reason.rule for reason in unsupported(spec)} == {"megatron.dropout"}) is is_refused


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, ""),
        ({"placement": Placement()}, "resources.device=cpu"),
        ({"training": {"compile": "whole"}}, "training.compile=whole"),
        ({"cuda_graph": CudaGraph("torch_compile")}, "cuda_graph.impl=torch_compile"),
        ({"training": {"recompute": "full"}}, "training.recompute=full"),
        ({"training": {"recompute": "selective", "recompute_modules": ("mlp",)}}, "training.recompute_modules=[mlp]"),
        ({"training": {"recompute": "selective"}}, ""),
        ({"parallelism": Parallelism(dp=2, ep=2, dispatcher="allgather")}, "parallelism.dispatcher=allgather"),
        ({"parallelism": Parallelism(dp=2, ep=2)}, ""),
        ({"cuda_graph": CudaGraph("full_iteration", warmup_steps=0)}, "cuda_graph.warmup_steps=0"),
        ({"cuda_graph": CudaGraph("full_iteration")}, ""),
    ],
    ids=str,
)  # fmt: skip
def test_what_products_in_8_bits_cannot_be_part_of(changes: dict[str, Any], field: str) -> None:
    training = Training(precision="bf16", fp8="delayed", **changes.pop("training", {}))
    spec = RunSpec(model=MOE, training=training, placement=Placement(device="cuda"))
    reasons = unsupported(dataclasses.replace(spec, **changes))
    assert [reason.rule for reason in reasons] == ["torch_native.fp8"] * bool(field)
    assert all(field in reason.message for reason in reasons)


def test_a_model_that_lies_on_several_ranks_is_not_compiled_whole() -> None:
    for degree in ("tp", "pp", "ep"):
        layout = Parallelism(**{degree: 2})
        (reason,) = unsupported(RunSpec(model=MOE, parallelism=layout, cuda_graph=CudaGraph(impl="torch_compile")))
        assert reason.rule == "torch_native.impl"
        (reason,) = unsupported(RunSpec(model=MOE, parallelism=layout, training=Training(compile="whole")))
        assert reason.rule == "torch_native.compile"
        assert unsupported(RunSpec(model=MOE, parallelism=layout)) == ()


def test_parts_of_a_model_that_is_compiled_whole_are_not_captured() -> None:
    on_cuda = RunSpec(training=Training(compile="whole"), placement=Placement(device="cuda"))
    for impl in ("none", "torch_compile", "full_iteration"):
        assert unsupported(dataclasses.replace(on_cuda, cuda_graph=CudaGraph(impl))) == ()
    for impl in ("torch", "transformer_engine"):
        (reason,) = unsupported(dataclasses.replace(on_cuda, cuda_graph=CudaGraph(impl)))
        assert reason.rule == "torch_native.impl" and f"cuda_graph.impl={impl}" in reason.message
        assert "training.compile=none" in reason.remedy


def test_layers_are_checked_where_the_model_is_not_one_function() -> None:
    on_cuda = RunSpec(placement=Placement(device="cuda"), layer_check_steps=8)
    for impl in ("none", "torch", "transformer_engine", "full_iteration"):
        assert unsupported(dataclasses.replace(on_cuda, cuda_graph=CudaGraph(impl))) == ()
    (reason,) = unsupported(dataclasses.replace(on_cuda, cuda_graph=CudaGraph("torch_compile")))
    assert reason.rule == "torch_native.layer_check_steps" and reason.message.startswith("layer_check_steps=8, ")
    (reason,) = unsupported(dataclasses.replace(on_cuda, training=Training(compile="whole")))
    assert reason.rule == "torch_native.layer_check_steps"


def test_all_reasons_come_at_once() -> None:
    spec = with_field(with_field(RunSpec(), "parallelism.cp", 2), "training.cpu_offloading", True)
    assert {reason.rule for reason in unsupported(spec)} == {"torch_native.cp", "torch_native.cpu_offloading"}


BF16 = Training(precision="bf16")
ONE_PACK = dataclasses.replace(BF16, micro_batch_size=1)
ON_GPU = RunSpec(engine="megatron", training=BF16, placement=Placement(device="cuda"))
SIGMOID = {"moe_router_score_function": "sigmoid"}
MEGATRON_REFUSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Each key is a rule, followed by fields of the model and fields of other sections.
    "step_checks": ({}, {"step_checks": 1, "parallelism": Parallelism(overlap_moe_expert_parallel_comm=True)}),
    "weights": ({"weights": "/a/checkpoint"}, {}),
    "hybrid": ({"hybrid_override_pattern": "MM", "qk_layernorm": True}, {}),
    "rope_scaling": ({"rope_scaling": "llama3", "rope_original_max_position": 4096}, {}),
    "moe_router_normalize_topk": ({**vars(MOE), **SIGMOID, "moe_router_normalize_topk": False}, {}),
    "moe_expert_capacity_factor": ({**vars(MOE), "moe_expert_capacity_factor": 1.0}, {}),
    "moe_router_fusion": ({}, {"training": Training(moe_router_fusion=True)}),
    "fused_gradients": (
        {},
        {
            "training": dataclasses.replace(BF16, gradient_accumulation_fusion=True, global_batch_size=4, micro_batch_size=2),
            "cuda_graph": CudaGraph("transformer_engine", ("attn",)),
        },
    ),
    "moe_pad_expert_input_to_capacity": (
        {**vars(MOE), "moe_expert_capacity_factor": 9.0, "moe_pad_expert_input_to_capacity": True}, {}),
    "moe_shared_expert_ffn_hidden_size": (
        {**vars(MOE), "moe_shared_expert_ffn_hidden_size": 8, "add_bias_linear": True}, {}),
    "tp": (vars(MOE), {"parallelism": Parallelism(tp=2, sequence_parallel=True)}),
    "cp": ({"window_size": 8}, {"parallelism": Parallelism(cp=2)}),
    "overlap_moe_expert_parallel_comm": (
        {**vars(MOE), "moe_layer_freq": 2},
        {"parallelism": Parallelism(dp=2, ep=2, overlap_moe_expert_parallel_comm=True)},
    ),
    "schedule": ({}, {"parallelism": Parallelism(pp=2, schedule="gpipe")}),
    "compile": ({}, {"training": Training(compile="elementwise")}),
    "attention_backend": ({}, {"training": Training(attention_backend="flex")}),
    "deterministic": ({"attention_sinks": True}, {"training": dataclasses.replace(BF16, deterministic=True)}),
    "cpu_offloading": ({}, {"training": Training(cpu_offloading=True)}),
    "fp8_weight_caching": ({}, {"training": Training(precision="bf16", fp8="delayed", fp8_weight_caching=False)}),
    "variable_sequence_lengths": ({}, {"training": Training(variable_sequence_lengths=True)}),
    "packed_sequences": ({}, {"data": PACKED}),
    "packed_batch": ({}, {"data": PADDED, "training": dataclasses.replace(ONE_PACK, micro_batch_size=2, global_batch_size=2)}),
    "packed_cp": ({}, {"data": PADDED, "training": ONE_PACK, "parallelism": Parallelism(cp=2)}),
    "packed_sinks": ({"attention_sinks": True}, {"data": PADDED, "training": ONE_PACK}),
    "local_inputs": ({}, {"cuda_graph": CudaGraph("local")}),
    "precision": ({}, {"training": Training(), "cuda_graph": CudaGraph("transformer_engine", ("attn",))}),
    "yarn_positions": ({"rope_scaling": "yarn"}, {"cuda_graph": CudaGraph("transformer_engine", ("attn",))}),
    "local_pipeline": ({}, {"megatron_core": "0.19", "parallelism": Parallelism(pp=2), "cuda_graph": CudaGraph("local")}),
    "batch_p2p_sync": ({}, {"parallelism": Parallelism(pp=2), "cuda_graph": CudaGraph("full_iteration")}),
    "recompute": ({}, {"training": dataclasses.replace(BF16, recompute="selective"), "cuda_graph": CudaGraph("transformer_engine")}),
    "recompute_norm": (vars(MOE), {"training": dataclasses.replace(BF16, recompute="selective", recompute_modules=("layernorm",)),
                                  "cuda_graph": CudaGraph("transformer_engine", ("attn", "moe_router"))}),
    "recompute_dense_norm": ({}, {"training": dataclasses.replace(BF16, recompute="selective", recompute_modules=("layernorm",))}),
    "recompute_act": (vars(MOE), {"training": dataclasses.replace(
        BF16, deterministic=True, recompute="selective", recompute_modules=("moe_act",)), "cuda_graph": CudaGraph("local")}),
    "dropout": ({"attention_dropout": 0.1}, {"training": dataclasses.replace(BF16, recompute="selective")}),
    "optimizer_precision": ({}, {"training": dataclasses.replace(BF16, optimizer_precision="lean")}),
    "optimizer": ({}, {"cuda_graph": CudaGraph("full_iteration", optimizer=True)}),
    "capturable_optimizer": ({}, {"megatron_core": "0.19", "cuda_graph": CudaGraph("full_iteration", optimizer=True)}),
    "device": ({}, {"placement": Placement(device="cpu")}),
    "mend": ({}, {"cuda_graph": CudaGraph("transformer_engine", ("attn",), mend=("yarn_positions",))}),
}  # fmt: skip


def test_packed_sequences_with_sinks_run_with_the_release_that_takes_a_later_transformer_engine() -> None:
    spec = dataclasses.replace(ON_GPU, model=Model(attention_sinks=True), data=PADDED, training=ONE_PACK)
    assert rules_of(spec) == {"megatron.packed_sinks"}
    assert rules_of(dataclasses.replace(spec, megatron_core="0.19")) == set()


@pytest.mark.parametrize("rule", MEGATRON_REFUSES)
def test_megatron_refuses_what_it_was_not_seen_to_do(rule: str) -> None:
    model, sections = MEGATRON_REFUSES[rule]
    reasons = unsupported(dataclasses.replace(ON_GPU, model=Model(**model), **sections))
    (reason,) = reasons
    assert reason.rule == f"megatron.{rule}"
    assert ", but " in reason.message
    assert reason.remedy


@pytest.mark.parametrize("fault", [fault.id for fault in megatron.KNOWN_FAULTS])
def test_a_known_fault_runs_where_a_verdict_shows_it_and_is_named_in_any_case(fault: str) -> None:
    fused = Training(precision="bf16", gradient_accumulation_fusion=True, global_batch_size=4, micro_batch_size=1)
    attention = CudaGraph("transformer_engine", ("attn",))
    spec = {
        "megatron.local_inputs": dataclasses.replace(ON_GPU, cuda_graph=CudaGraph("local")),
        "megatron.yarn_positions": dataclasses.replace(ON_GPU, model=Model(rope_scaling="yarn"), cuda_graph=attention),
        "megatron.fused_gradients": dataclasses.replace(ON_GPU, training=fused, cuda_graph=attention),
    }[fault]
    deterministic = dataclasses.replace(spec, training=dataclasses.replace(spec.training, deterministic=True))
    checked = dataclasses.replace(spec, step_checks=5)
    assert [rules_of(one) for one in (spec, deterministic, checked)] == [{fault}, set(), set()]
    assert all([reason.rule for reason in known_faults(one)] == [fault] for one in (spec, deterministic, checked))
    mend = fault.removeprefix("megatron.")
    if mend in megatron.MENDS:
        mended = dataclasses.replace(spec, cuda_graph=dataclasses.replace(spec.cuda_graph, mend=(mend,)))
        assert (unsupported(mended), known_faults(mended)) == ((), ())


def test_a_refusal_names_the_releases_that_it_holds_for() -> None:
    local = dataclasses.replace(ON_GPU, cuda_graph=CudaGraph("local"))
    (reason,) = unsupported(local)
    assert reason.message.endswith("(megatron-core 0.16, not 0.19)")
    later = dataclasses.replace(local, megatron_core="0.19")
    assert (unsupported(later), known_faults(later)) == ((), ())
    mended = dataclasses.replace(later, cuda_graph=CudaGraph("local", mend=("local_inputs",)))
    assert rules_of(mended) == {"megatron.mend"}
    eager = dataclasses.replace(ON_GPU, megatron_core="0.19")
    (reason,) = unsupported(dataclasses.replace(eager, parallelism=Parallelism(pp=2, schedule="gpipe")))
    assert reason.message.endswith("(megatron-core 0.16 and 0.19)")


def test_local_graphs_of_a_pipeline_are_refused_from_0_19_on_and_each_fix_leads_to_a_cell_that_runs() -> None:
    """Without a second micro-batch, or in 0.16, no backward pass comes between the forward passes that share a buffer."""
    stages, virtual = Parallelism(pp=2), Parallelism(pp=2, vpp=2, schedule="interleaved")
    for layout in (stages, virtual):
        spec = dataclasses.replace(
            ON_GPU, model=Model(num_layers=4), megatron_core="0.19", parallelism=layout, cuda_graph=CudaGraph("local"),
            placement=Placement(device="cuda", ranks_per_node=2),
        )  # fmt: skip
        (reason,) = unsupported(spec)
        assert reason.rule == "megatron.local_pipeline" and reason.message.endswith("(megatron-core 0.19, not 0.16)")
        (sound,) = keep_sound_fixes(spec, (reason,))
        for fix in (
            "impl=transformer_engine",
            "impl=full_iteration and parallelism.batch_p2p_sync=false",
            "mend=[local_inputs]",
        ):
            assert fix in sound.remedy
    alone = dataclasses.replace(spec, parallelism=stages, training=dataclasses.replace(BF16, global_batch_size=1))
    assert rules_of(alone) == rules_of(dataclasses.replace(spec, parallelism=Parallelism(dp=2))) == set()


CAPTURES_ATTENTION = {
    CudaGraph("transformer_engine"): True,
    CudaGraph("transformer_engine", ("attn", "moe_router")): True,
    CudaGraph("transformer_engine", ("moe_router", "moe_preprocess")): False,
    CudaGraph("full_iteration"): False,
    CudaGraph(): False,
}


@pytest.mark.parametrize("graph", CAPTURES_ATTENTION, ids=str)
def test_megatron_is_refused_what_it_does_wrong_in_a_layers_graph_alone(graph: CudaGraph) -> None:
    yarn = dataclasses.replace(ON_GPU, model=Model(rope_scaling="yarn"), cuda_graph=graph)
    recomputed = dataclasses.replace(ON_GPU, training=Training(recompute="selective"), cuda_graph=graph)
    captured = CAPTURES_ATTENTION[graph]
    assert ("megatron.recompute" in rules_of(recomputed)) is captured
    assert ("megatron.yarn_positions" in rules_of(yarn)) is captured


def test_a_module_is_recomputed_in_no_layers_graph_and_beside_any() -> None:
    experts = dataclasses.replace(MOE, moe_layer_freq=2, moe_shared_expert_ffn_hidden_size=16)
    beside = {  # For each module, a scope without it and a scope with it.
        "core_attn": (("mlp",), ("attn",)),
        "mlp": (("attn", "moe_router"), ("mlp",)),
        "moe": (("attn", "mlp"), ("moe_router",)),
        "shared_experts": (("attn",), ("moe_router", "moe_preprocess")),
    }
    for module, (outside, holding) in beside.items():
        training = dataclasses.replace(BF16, recompute="selective", recompute_modules=(module,))
        for scope, rules in ((outside, set()), (holding, {"megatron.recompute"}), ((), {"megatron.recompute"})):
            graph = CudaGraph("transformer_engine", scope)
            assert rules_of(dataclasses.replace(ON_GPU, model=experts, training=training, cuda_graph=graph)) == rules, (
                module,
                scope,
            )
        whole = dataclasses.replace(ON_GPU, model=experts, training=training, cuda_graph=CudaGraph("full_iteration"))
        assert rules_of(whole) == set()


def test_torch_native_recomputes_within_a_graph_or_outside_of_it() -> None:
    on_gpu = RunSpec(model=MOE, placement=Placement(device="cuda"))
    named = {
        name: dataclasses.replace(BF16, recompute="selective", recompute_modules=(name,))
        for name in ("layernorm", "moe", "moe_act")
    }
    graphs = {
        CudaGraph("torch"): set(),
        CudaGraph("full_iteration"): set(),
        CudaGraph("torch", ("attn",)): {"layernorm"},
        CudaGraph("transformer_engine", ("attn", "moe_router")): {"layernorm", "moe"},
        CudaGraph("torch_compile"): set(named),
    }
    for graph, refused in graphs.items():
        for name, training in named.items():
            rules = rules_of(dataclasses.replace(on_gpu, training=training, cuda_graph=graph))
            assert rules == ({"torch_native.recompute_modules"} if name in refused else set()), (graph, name)


def test_local_graphs_cannot_hold_recomputed_attention_either() -> None:
    recomputed = Training(precision="bf16", recompute="selective", deterministic=True)
    spec = dataclasses.replace(ON_GPU, training=recomputed, cuda_graph=CudaGraph("local"))
    assert rules_of(spec) == {"megatron.recompute"}


@pytest.mark.parametrize("release", RELEASES)
def test_a_whole_step_over_stages_needs_transfers_that_do_not_wait(release: MegatronCore) -> None:
    whole = dataclasses.replace(ON_GPU, megatron_core=release, cuda_graph=CudaGraph("full_iteration"))
    interleaved = Parallelism(pp=2, vpp=2, schedule="interleaved")
    taken = {
        Parallelism(pp=2): False,
        Parallelism(pp=2, batch_p2p_sync=False): True,
        interleaved: True,
        Parallelism(): True,
    }
    for layout, is_taken in taken.items():
        reasons = unsupported(dataclasses.replace(whole, parallelism=layout))
        assert (not reasons) is is_taken, layout
        assert all("parallelism.batch_p2p_sync=false" in reason.remedy for reason in reasons)
    attention = dataclasses.replace(
        whole, parallelism=Parallelism(pp=2), cuda_graph=CudaGraph("transformer_engine", ("attn",))
    )
    assert unsupported(attention) == ()


def test_fused_gradients_are_refused_where_one_graph_serves_all_micro_batches() -> None:
    fused = Training(precision="bf16", gradient_accumulation_fusion=True, global_batch_size=4, micro_batch_size=1)
    spec = dataclasses.replace(ON_GPU, model=MOE, training=fused, cuda_graph=CudaGraph("transformer_engine", ("attn",)))
    assert rules_of(spec) == {"megatron.fused_gradients"}
    own_graphs = (Parallelism(pp=2), Parallelism(ep=2, dp=2, overlap_moe_expert_parallel_comm=True))
    one_microbatch = Training(precision="bf16", gradient_accumulation_fusion=True, global_batch_size=1)
    assert all(rules_of(dataclasses.replace(spec, parallelism=layout)) == set() for layout in own_graphs)
    assert rules_of(dataclasses.replace(spec, training=one_microbatch)) == set()


def test_megatron_captures_the_optimizer_where_a_graph_can_contain_it() -> None:
    capturable = dataclasses.replace(BF16, capturable_optimizer=True)
    spec = dataclasses.replace(
        ON_GPU, megatron_core="0.19", training=capturable, cuda_graph=CudaGraph("full_iteration", optimizer=True)
    )
    assert rules_of(spec) == rules_of(dataclasses.replace(spec, cuda_graph=CudaGraph())) == set()
    for graph in (spec.cuda_graph, CudaGraph()):
        (reason,) = unsupported(dataclasses.replace(spec, megatron_core="0.16", cuda_graph=graph))
        assert reason.rule == "megatron.optimizer" and reason.message.endswith("(megatron-core 0.16, not 0.19)")
    sharded = Parallelism(dp=2, distributed_optimizer=True)
    lean = dataclasses.replace(capturable, optimizer_precision="lean")
    assert rules_of(dataclasses.replace(spec, training=lean, parallelism=sharded)) == {"megatron.capturable_optimizer"}
    padded = dataclasses.replace(MOE, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    of_experts = {
        Parallelism(dp=2, ep=2): False,
        Parallelism(dp=2, ep=2, distributed_optimizer=True): True,
        Parallelism(dp=2): True,
    }
    for layout, is_taken in of_experts.items():
        assert (rules_of(dataclasses.replace(spec, model=padded, parallelism=layout)) == set()) is is_taken


@pytest.mark.parametrize(("factor", "pads", "fails"), [(2.0, True, False), (2.5, True, True), (2.5, False, False)])
def test_megatron_pads_no_expert_beyond_the_number_of_tokens(factor: float, pads: bool, fails: bool) -> None:
    """On a CPU, both releases ended with a shape error at 2.5 with 4 experts and 2 choices, and trained at 2.0."""
    model = dataclasses.replace(
        MOE,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_expert_capacity_factor=factor,
        moe_pad_expert_input_to_capacity=pads,
    )
    assert ("megatron.moe_pad_expert_input_to_capacity" in rules_of(dataclasses.replace(ON_GPU, model=model))) is fails


def test_megatron_checks_steps_where_it_can_restore_and_perturb_them() -> None:
    spec = dataclasses.replace(ON_GPU, model=MOE, step_checks=1, cuda_graph=CudaGraph("transformer_engine", ("attn",)))
    assert rules_of(spec) == set()
    overlapped = Parallelism(ep=2, dp=2, overlap_moe_expert_parallel_comm=True)
    spec = dataclasses.replace(spec, parallelism=overlapped, training=Training(precision="bf16"))
    assert rules_of(spec) == {"megatron.step_checks"}
    assert rules_of(dataclasses.replace(spec, step_checks=0)) == set()


def test_fused_routers_promise_no_order_of_additions() -> None:
    fused = dataclasses.replace(ON_GPU, model=MOE, training=Training(precision="bf16", moe_router_fusion=True))
    assert rules_of(fused) == set()
    deterministic = dataclasses.replace(fused.training, deterministic=True)
    assert rules_of(dataclasses.replace(fused, training=deterministic)) == {"megatron.moe_router_fusion"}


def rules_of(spec: RunSpec) -> set[str]:
    return {reason.rule for reason in unsupported(spec)}


def test_every_limit_of_megatron_is_met_by_a_case() -> None:
    assert {limit.id for limit in SUPPORT["megatron"]} == {f"megatron.{name}" for name in MEGATRON_REFUSES}


ROUTERS = {
    # Score function, order, normalized, top-k.
    ("softmax", "softmax_then_topk", True, 2): True,
    ("softmax", "softmax_then_topk", False, 2): True,
    ("softmax", "softmax_then_topk", False, 1): True,
    ("softmax", "softmax_then_topk", True, 1): False,
    ("softmax", "topk_then_softmax", True, 2): True,
    ("softmax", "topk_then_softmax", True, 1): False,
    ("sigmoid", "softmax_then_topk", True, 2): True,
    ("sigmoid", "softmax_then_topk", False, 2): False,
    ("sigmoid", "softmax_then_topk", False, 1): True,
    ("sigmoid", "softmax_then_topk", True, 1): False,
    ("sigmoid", "topk_then_softmax", True, 2): False,
}


@pytest.mark.parametrize("router", ROUTERS)
def test_megatron_takes_the_routers_that_it_has(router: tuple[Any, ...]) -> None:
    names = ("moe_router_score_function", "moe_router_order", "moe_router_normalize_topk", "moe_router_topk")
    model = dataclasses.replace(MOE, **dict(zip(names, router, strict=True)))
    assert (unsupported(dataclasses.replace(ON_GPU, model=model)) == ()) == ROUTERS[router]


def test_megatron_exchanges_beside_computations_of_several_experts_a_rank_or_of_parts_of_one() -> None:
    for layout, taken in (({"ep": 2}, True), ({"ep": 4}, False), ({"ep": 4, "tp": 2, "etp": 2}, True)):
        parallelism = Parallelism(dp=4, overlap_moe_expert_parallel_comm=True, **layout)
        spec = dataclasses.replace(ON_GPU, model=MOE, parallelism=parallelism)
        assert ("megatron.overlap_moe_expert_parallel_comm" not in rules_of(spec)) is taken, layout


def test_megatron_cuts_sequences_of_16_bits_without_windows_or_sinks() -> None:
    bf16, fp32 = Training(precision="bf16"), Training(precision="fp32")
    for model, training, taken in ((MOE, bf16, True), (MOE, fp32, False), (SINKS, bf16, False)):
        spec = dataclasses.replace(ON_GPU, model=model, training=training)
        assert "megatron.cp" not in rules_of(spec)
        assert ("megatron.cp" not in rules_of(dataclasses.replace(spec, parallelism=Parallelism(cp=2)))) is taken


@pytest.mark.parametrize("graph", [CudaGraph(), CudaGraph("transformer_engine", ("attn",))], ids=["eager", "graphed"])
@pytest.mark.parametrize("backend", ["auto", "transformer_engine"])
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("engine", ["torch_native", "megatron"])
def test_no_deterministic_run_gets_the_gradient_of_sinks_from_transformer_engine(
    engine: EngineName, release: MegatronCore, backend: Literal["auto", "transformer_engine"], graph: CudaGraph
) -> None:
    training = Training(precision="bf16", deterministic=True, attention_backend=backend)
    sinks = Model(attention_sinks=True)
    spec = dataclasses.replace(
        ON_GPU, engine=engine, megatron_core=release, model=sinks, training=training, cuda_graph=graph
    )
    assert rules_of(dataclasses.replace(spec, model=Model())) == set()
    assert rules_of(with_field(spec, "training.deterministic", False)) == set()
    if (engine, backend) == ("torch_native", "auto"):
        assert rules_of(spec) == set()
        return
    assert rules_of(spec) == {f"{engine}.deterministic"}
    (reason,) = keep_sound_fixes(spec, unsupported(spec))
    fixes = alternatives(reason.remedy)
    assert fixes
    for _, settings in fixes:
        assert rules_of(apply(spec, settings)) == set(), settings


def test_remedies_are_spelt_as_a_recipe_spells_them() -> None:
    wrong = {"parallelism.etp": 2, "training.cpu_offloading": True, "model.moe_expert_capacity_factor": 1.0}
    remedies = [unsupported(with_field(RunSpec(), field, value))[0].remedy for field, value in wrong.items()]
    assert remedies[0] == "Set parallelism.etp=1."
    assert remedies[1] == "Set training.cpu_offloading=false."
    assert "model.moe_expert_capacity_factor=null" in remedies[2]


def test_megatron_reduces_experts_over_those_who_hold_the_same() -> None:
    """Without expert parallelism, these are the ranks that hold the same parts of the surrounding layers."""
    for layout, taken in (
        (Parallelism(tp=2, etp=1), False),
        (Parallelism(tp=2, etp=2), True),
        (Parallelism(dp=2, etp=2), False),
        (Parallelism(tp=2, ep=2, dp=2, etp=2), True),
        (Parallelism(tp=2, ep=2, etp=1), True),
    ):
        spec = dataclasses.replace(ON_GPU, model=MOE, parallelism=layout)
        assert ("megatron.tp" not in rules_of(spec)) is taken, layout


HYBRID = RunSpec(
    engine="megatron",
    model=Model(num_layers=3, hybrid_override_pattern="M*-", hidden_size=256),
    placement=Placement(device="cuda"),
    training=Training(precision="bf16"),
)


def test_a_hybrid_model_runs_on_megatron_with_every_scope_of_its_layers() -> None:
    for scope in ((), ("mamba",), ("attn", "mamba"), ("attn", "mlp", "mamba")):
        graph = CudaGraph("transformer_engine", scope)
        assert unsupported(dataclasses.replace(HYBRID, cuda_graph=graph)) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.qk_layernorm", True),
        ("parallelism.tp", 2),
        ("training.recompute", "full"),
        ("training.deterministic", True),
        ("data.packed_sequences", True),
    ],
)
def test_a_hybrid_model_refuses_by_name_what_its_stack_lacks(field: str, value: Any) -> None:
    (reason,) = [each for each in unsupported(with_field(HYBRID, field, value)) if each.rule == "megatron.hybrid"]
    assert reason.message.startswith(f"model.hybrid_override_pattern='M*-', {field}={spell(value)}, but")
