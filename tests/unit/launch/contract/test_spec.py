"""Test which changes of a RunSpec make another run, another workload or another task, and that JSON preserves the spec."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.contract.spec import (
    SECTIONS,
    CudaGraph,
    Fault,
    GraphImpl,
    Model,
    Parallelism,
    RunSpec,
    Training,
    spec_from_json,
    spec_to_json,
)
from launch.contract.spec_ids import digest

FIELDS = [
    (section, field.name)
    for section, cls in SECTIONS.items()
    for field in dataclasses.fields(cls)
    if section != "fault"
]

NOT_OF_THE_RUN = {("model", "preset")}
OF_THE_TASK = {
    *((section, name) for section, name in FIELDS if section in ("model", "training", "data", "command")),
} - {
    ("model", "preset"),
    ("data", "max_documents"),
    *(("training", name) for name in (
        "micro_batch_size", "recompute", "recompute_modules", "compile", "attention_backend", "gradient_accumulation_fusion", "moe_router_fusion",
        "capturable_optimizer", "cpu_offloading", "deterministic", "fp8_weight_caching",
    )),
}  # fmt: skip


def other(kind: Any, value: Any) -> Any:
    """Return a value of ``kind`` that differs from ``value``."""
    choices = [choice for arg in (kind, *get_args(kind)) if get_origin(arg) is Literal for choice in get_args(arg)]
    if choices:
        return next((choice for choice in choices if choice != value), None)
    if get_origin(kind) is tuple:
        return (*value, "attn")
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else "other" if isinstance(value, str) else 1.5


def changed(section: str, name: str) -> RunSpec | None:
    spec = RunSpec()
    part = getattr(spec, section)
    value = other(get_type_hints(SECTIONS[section])[name], getattr(part, name))
    if value is None:  # The field has only one value.
        return None
    return dataclasses.replace(spec, **{section: dataclasses.replace(part, **{name: value})})


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_each_field_counts_where_it_matters(section: str, name: str) -> None:
    spec = changed(section, name)
    if spec is None:
        assert (section, name) == ("training", "optimizer")
        return
    same = RunSpec()
    graph_alone = section == "cuda_graph" and name != "warmup_steps"
    assert (spec.run_id == same.run_id) == ((section, name) in NOT_OF_THE_RUN)
    assert (spec.workload_id == same.workload_id) == (graph_alone or (section, name) in NOT_OF_THE_RUN)
    assert (spec.task_id == same.task_id) == ((section, name) not in OF_THE_TASK)


def test_what_drops_tokens_is_a_task_of_the_layout_that_it_drops_them_by() -> None:
    experts = Model(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16)
    balanced = dataclasses.replace(experts, moe_aux_loss_coeff=0.01)
    dropping = dataclasses.replace(experts, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    for model, by_size, by_stretch in ((experts, False, False), (balanced, True, False), (dropping, True, True)):
        spec = RunSpec(model=model)
        larger = dataclasses.replace(spec, training=Training(micro_batch_size=2))
        assert (larger.task_id != spec.task_id) == by_size
        for layout in (Parallelism(tp=2), Parallelism(cp=2)):
            split = dataclasses.replace(spec, parallelism=layout)
            assert (split.task_id != spec.task_id) == by_stretch


def test_a_fault_counts_everywhere_where_it_is_set_and_nowhere_else() -> None:
    none, spec = RunSpec(fault=Fault("none", 7)), RunSpec()
    assert (none.run_id, none.workload_id, none.task_id) == (spec.run_id, spec.workload_id, spec.task_id)
    faults = [RunSpec(fault=Fault("nan", 7)), RunSpec(fault=Fault("nan", 8)), RunSpec(fault=Fault("hang", 7))]
    for name in ("run_id", "workload_id", "task_id"):
        assert len({getattr(value, name) for value in (spec, *faults)}) == 4
    for value in faults:
        assert spec_from_json(json.loads(json.dumps(spec_to_json(value)))) == value


def test_a_profiled_run_is_compared_with_no_other() -> None:
    spec, profiled = RunSpec(), RunSpec(profile="nsys")
    assert all(getattr(spec, name) != getattr(profiled, name) for name in ("run_id", "workload_id", "task_id"))
    assert spec_from_json(json.loads(json.dumps(spec_to_json(profiled)))) == profiled


def test_a_run_whose_layers_are_checked_is_another_run_and_its_speed_another_tasks() -> None:
    spec, others = RunSpec(), [RunSpec(layer_check_steps=steps) for steps in (8, 9)]
    for name in ("run_id", "workload_id", "task_id"):
        assert len({getattr(value, name) for value in (spec, *others)}) == 3
    assert dataclasses.replace(others[0], cuda_graph=CudaGraph("torch")).workload_id == others[0].workload_id
    for value in others:
        assert spec_from_json(json.loads(json.dumps(spec_to_json(value)))) == value


def test_engine_environment_and_repeat() -> None:
    spec = RunSpec()
    engine = dataclasses.replace(spec, engine="megatron")
    environment = dataclasses.replace(spec, environment={"NCCL_GRAPH_REGISTER": "0"})
    for change in (engine, environment):
        assert change.workload_id != spec.workload_id
        assert change.cell_id != spec.cell_id
        assert change.task_id == spec.task_id
    again = dataclasses.replace(spec, repeat=1)
    assert (again.cell_id, again.workload_id, again.task_id) == (spec.cell_id, spec.workload_id, spec.task_id)
    assert again.run_id != spec.run_id


@given(st.dictionaries(st.text("AB_", min_size=1), st.text(max_size=3), min_size=2), st.randoms())
def test_the_order_of_keys_makes_no_other_run(environment: dict[str, str], random: Any) -> None:
    items = list(environment.items())
    random.shuffle(items)
    ours, theirs = RunSpec(environment=environment), RunSpec(environment=dict(items))
    assert (ours.run_id, ours.workload_id) == (theirs.run_id, theirs.workload_id)


@pytest.mark.parametrize("graph", [CudaGraph(impl, scope) for impl in get_args(GraphImpl) for scope in ((), ("attn",))])
def test_a_twin_shares_its_workload(graph: CudaGraph) -> None:
    graphed, eager = RunSpec(cuda_graph=graph), RunSpec()
    assert graphed.workload_id == eager.workload_id
    assert (graphed.cell_id == eager.cell_id) == (graph == CudaGraph())


def test_a_run_id_can_be_read_and_names_a_file() -> None:
    spec = RunSpec(cuda_graph=CudaGraph("transformer_engine", ("attn", "moe_router")), repeat=3)
    assert re.fullmatch(r"transformer_engine\.attn\.moe_router-[0-9a-f]{10}-r3", spec.run_id)


def test_the_digest_does_not_drift() -> None:
    """Records on disk are found by their digest. With another digest, every finished run would count as never run."""
    assert digest({"b": [1, 2.5, None], "a": "ä"}) == digest({"a": "ä", "b": [1, 2.5, None]}) == "4b12564ba8"


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_a_spec_survives_json(section: str, name: str) -> None:
    spec = dataclasses.replace(changed(section, name) or RunSpec(), environment={"A": "b"}, repeat=2)
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_a_field_of_another_version_is_refused() -> None:
    content = spec_to_json(RunSpec())
    content["training"]["momentum"] = 0.9
    with pytest.raises(TypeError, match="momentum"):
        spec_from_json(content)


def test_derived_numbers() -> None:
    spec = RunSpec(parallelism=Parallelism(tp=2, pp=3, cp=2, dp=4))
    assert spec.parallelism.world_size == 48
    assert spec.num_microbatches == 2  # There are 8 sequences, 1 for each micro-batch, and 4 data-parallel ranks.
    assert not Model().is_moe
    assert Model(num_moe_experts=2, moe_layer_freq=2).has_dense_layers


def test_runs_from_before_a_field_keep_their_ids() -> None:
    """These are the ids of default settings, computed before dropout and the lean optimizer existed."""
    assert (RunSpec().task_id, RunSpec().workload_id, RunSpec().cell_id) == (
        "35cf064635", "6114efc196", "eager-3823b8fef1",
    )  # fmt: skip
