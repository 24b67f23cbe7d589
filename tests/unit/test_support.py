"""What torch_native refuses: every field that it would otherwise ignore."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from launch.spec import CudaGraph, Data, Model, Parallelism, Placement, RunSpec, Training, spec_from_json, spec_to_json
from launch.support import unsupported

MOE = Model(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16)
SINKS = dataclasses.replace(MOE, attention_sinks=True, window_size=8)
PACKED = Data(packed_sequences=True, eod_token=0)

REFUSED = {
    "model.kv_channels": 15,
    "model.moe_expert_capacity_factor": 1.0,
    "parallelism.etp": 2,
    "parallelism.cp": 2,
    "training.attention_backend": "flex",
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
    shown = list(value) if isinstance(value, tuple) else value
    assert f"{field}={shown!r}" in reason.message
    assert reason.remedy


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(),
        RunSpec(model=dataclasses.replace(MOE, moe_layer_freq=2, moe_z_loss_coeff=1e-3), parallelism=Parallelism(dp=4)),
        RunSpec(cuda_graph=CudaGraph(impl="torch_compile")),
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
    ],
)
def test_a_backend_that_cannot_express_the_layers_is_refused(spec: RunSpec) -> None:
    assert [reason.rule for reason in unsupported(spec)] == ["torch_native.attention_backend"]
    auto = dataclasses.replace(spec, training=dataclasses.replace(spec.training, attention_backend="auto"))
    assert unsupported(auto) == ()


def test_a_model_that_lies_on_several_ranks_is_not_compiled_whole() -> None:
    for degree in ("tp", "pp", "ep"):
        layout = Parallelism(**{degree: 2})
        (reason,) = unsupported(RunSpec(model=MOE, parallelism=layout, cuda_graph=CudaGraph(impl="torch_compile")))
        assert reason.rule == "torch_native.impl"
        assert unsupported(RunSpec(model=MOE, parallelism=layout)) == ()


def test_all_reasons_come_at_once() -> None:
    spec = with_field(with_field(RunSpec(), "parallelism.cp", 2), "training.cpu_offloading", True)
    assert {reason.rule for reason in unsupported(spec)} == {"torch_native.cp", "torch_native.cpu_offloading"}


def test_an_engine_that_is_not_there_is_one_reason() -> None:
    (reason,) = unsupported(RunSpec(engine="megatron"))
    assert reason.message == "engine megatron is not part of this version"
    assert "torch_native" in reason.remedy


def test_remedies_are_spelt_as_a_recipe_spells_them() -> None:
    wrong = {"parallelism.etp": 2, "training.cpu_offloading": True, "model.moe_expert_capacity_factor": 1.0}
    remedies = [unsupported(with_field(RunSpec(), field, value))[0].remedy for field, value in wrong.items()]
    assert remedies[0] == "set parallelism.etp=1"
    assert remedies[1] == "set training.cpu_offloading=false"
    assert "model.moe_expert_capacity_factor=null" in remedies[2]
