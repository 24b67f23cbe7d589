"""Test planning: cells are judged, bundles are formed and interleaved, and the policy orders attempts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.common.atomic_files import dumps
from launch.common.typed_json import from_json
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan, Precedents, Reason
from launch.contract.spec import RunSpec, spec_from_json
from orchestrator.errors import InputError
from orchestrator.plan.planner import (
    check_budget,
    gpu_hours,
)
from orchestrator.recipe.fields import RECIPE
from orchestrator.sweeps.report_process import is_tracked
from orchestrator.targets import host
from orchestrator.targets.host import Host
from orchestrator.targets.slurm_cluster import Cluster
from tests.planned import ALIKE, BATCH, CLUSTER, COMPILED, CPU_HOST, GPU_HOST, TWO_NODES, cluster, plan


def names(plan: Plan) -> list[list[str]]:
    """Return the runs of each bundle by label and repeat: "eager 0"."""
    cells = plan.cell_of_run()
    return [[f"{cells[run].label} {run.rpartition('-r')[2]}" for run in bundle.run_ids] for bundle in plan.bundles]


# --- cells ----------------------------------------------------------------------------------------------------------


def test_each_cell_is_run_rejected_or_not_runnable_and_says_why(tmp_path: Path) -> None:
    impls = ["torch_compile", "full_iteration", "local"]
    found = plan(tmp_path, sweep={"grid": {"cuda_graph.impl": impls}}, training={"precision": "bf16"})
    assert [(cell.label, cell.state, [reason.rule for reason in cell.reasons][:1]) for cell in found.cells] == [
        ("eager", "run", []),
        ("torch_compile", "run", []),
        ("full_iteration", "not_runnable", ["host.gpus"]),
        ("local", "rejected", ["scope.impl_engine"]),
    ]
    for cell in found.cells:
        assert bool(cell.run_ids) == (cell.state == "run")
        assert all(reason.message and reason.remedy for reason in cell.reasons)


@pytest.mark.parametrize(
    ("fields", "state", "rules"),
    [
        (
            {"engine": "megatron", "training": {"precision": "bf16", "compile": "whole"}},
            "rejected",
            ["megatron.compile"],
        ),
        ({"resources": {"device": "cpu"}}, "rejected", ["torch_native.impl"]),
        ({}, "not_runnable", ["host.gpus"]),
        ({"engine": "megatron"}, "not_runnable", ["host.gpus", "host.packages"]),
        ({"model.hidden_size": 60}, "rejected", ["torch_native.hidden_size"]),
        ({"fault": {"kind": "oom_capture"}}, "not_runnable", ["host.gpus"]),
    ],
)
def test_what_no_host_runs_is_rejected_and_what_this_host_lacks_is_not_runnable(
    tmp_path: Path, fields: Mapping[str, Any], state: str, rules: list[str]
) -> None:
    graph = {"impl": "transformer_engine", "scope": ["attn"]}
    (cell,) = plan(tmp_path, **{"cuda_graph": graph, "training": {"precision": "bf16"}, **fields}).cells
    assert (cell.state, [reason.rule for reason in cell.reasons]) == (state, rules)


def test_a_cell_that_a_gpu_alone_refuses_runs_on_a_cpu(tmp_path: Path) -> None:
    (cell,) = plan(tmp_path, **{"model.hidden_size": 60, "training": {"precision": "bf16"}}).cells
    assert cell.state == "run"


def test_a_twin_that_serves_nobody_is_left_out_unless_it_was_asked_for(tmp_path: Path) -> None:
    grid = {"cuda_graph.impl": ["full_iteration"]}
    assert [cell.label for cell in plan(tmp_path, sweep={"grid": grid}).cells] == ["full_iteration"]
    grid = {"cuda_graph.impl": ["full_iteration", "none"]}
    assert [cell.label for cell in plan(tmp_path, sweep={"grid": grid}).cells] == ["eager", "full_iteration"]
    alone = plan(tmp_path, sweep={"grid": COMPILED}, only=["cuda_graph.impl=none"])
    assert names(alone) == [["eager 0", "eager 1"]]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_of_two_nodes_is_not_sent_to_another_host(tmp_path: Path, nodes: int) -> None:
    found = plan(tmp_path, host=CPU_HOST, parallelism={"dp": nodes}, resources={"device": "cuda", "nodes": nodes})
    remedies = [reason.remedy for cell in found.cells for reason in cell.reasons if reason.rule.startswith("host.")]
    assert all(
        ("on a host with 1 GPU, or " in one) == (nodes == 1) and "plan --cluster NAME" in one for one in remedies
    )
    assert remedies


def test_what_a_host_lacks(tmp_path: Path) -> None:
    def lacking(host: Host, **fields: Any) -> set[str]:
        return {reason.rule for cell in plan(tmp_path, host=host, **fields).cells for reason in cell.reasons}

    without_compiler = dataclasses.replace(CPU_HOST, has_compiler=False)
    assert "host.compiler" in lacking(without_compiler, sweep={"grid": COMPILED})
    assert "host.compiler" in lacking(without_compiler, training={"compile": "whole"})
    assert not lacking(without_compiler)
    assert "host.gpus" in lacking(CPU_HOST, resources={"device": "cuda"})
    assert "host.gpus" in lacking(GPU_HOST, parallelism={"dp": 4})
    assert "host.nodes" in lacking(CPU_HOST, parallelism={"dp": 2}, resources={"nodes": 2})
    assert "host.packages" in lacking(GPU_HOST, engine="megatron", training={"precision": "bf16"})
    assert "host.packages" in lacking(GPU_HOST, training={"precision": "bf16", "fp8": "delayed"})
    both = dataclasses.replace(GPU_HOST, packages=frozenset({"megatron-core 0.16", "transformer-engine"}))
    assert not lacking(both, engine="megatron", training={"precision": "bf16"})
    offloading = {"precision": "bf16", "cpu_offloading": True}
    assert lacking(both, engine="megatron", training=offloading) == {"megatron.cpu_offloading"}
    assert not lacking(CPU_HOST, sweep={"grid": COMPILED})


LACKING: Mapping[str, tuple[Cluster, dict[str, Any], str, str]] = {
    # The cluster, fields of the recipe (in addition to two nodes of eight GPUs), the rule, and a part of its message.
    "enough": (cluster(), {}, "", ""),
    "a feature that is there": (cluster(constraint="h100"), {}, "", ""),
    "an expression of features is Slurm's to judge": (cluster(constraint="h100&nvl"), {}, "", ""),
    "a partition that is down": (
        cluster(dataclasses.replace(BATCH, state="DOWN")), {}, "cluster.partition", "partition batch is DOWN"),
    "more nodes than there are": (
        cluster(), {"resources.nodes": 6}, "cluster.nodes", "the run needs 6 nodes, and partition batch has 4 that are"),
    "more CPU nodes than there are": (
        cluster(), {"resources": {"nodes": 6, "gpus_per_node": 1, "device": "cpu"}}, "cluster.nodes", "the run needs 6 nodes, and partition batch has 5"),
    "more nodes than a job may have": (
        cluster(), {"resources.nodes": 4}, "cluster.nodes", "the run needs 4 nodes, and partition batch gives a job at least 1 and at most 3"),
    "fewer nodes than a job must have": (
        cluster(dataclasses.replace(BATCH, min_nodes=3)), {}, "cluster.nodes", "gives a job at least 3"),
    "a feature that no node has": (
        cluster(constraint="a100"), {}, "cluster.nodes", "partition batch with feature a100 has no node"),
    "more GPUs than a node has": (
        cluster(), {"resources": {"nodes": 1, "gpus_per_node": 16, "device": "cuda"}}, "cluster.gpus", "the run needs 16 GPUs on a node, and nodes of partition batch have at most 8"),
    "GPUs of another type": (
        cluster(gpu_type="a100"), {}, "cluster.gpus", "the run needs 8 GPUs of type a100 on a node, and nodes of partition batch have at most 0"),
    "more CPUs than a node has": (
        cluster(cpus_per_task=12), {}, "cluster.cpus", "the run needs 96 CPUs on a node, and nodes of partition batch have at most 64"),
    "more CPUs than a node with GPUs has": (
        cluster(cpus_per_task=4), {}, "cluster.nodes", "partition batch has 0 that are large enough"),
    "more memory than a node has": (
        cluster(mem="1T"), {}, "cluster.memory", "the run needs 1,048,576 MB of memory on a node, and nodes of partition batch have at most 512,000"),
    "a model that no GPU holds": (
        cluster(gpu_memory_gib=0.0001), {}, "cluster.gpu_memory", "GiB before the first step, and gpu_memory_gib of the profile is 0.0001"),
    "a model that a GPU may hold": (cluster(gpu_memory_gib=80), {}, "", ""),
    "more nodes than the profile allows": (
        cluster(max_nodes=1), {}, "cluster.max_nodes", "the run needs 2 nodes, and max_nodes of the profile lets a sweep use 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_what_a_cluster_lacks_is_said_with_both_numbers(tmp_path: Path, case: str) -> None:
    target, fields, rule, message = LACKING[case]
    tree = dict(TWO_NODES)
    for place, value in fields.items():
        section, _, name = place.partition(".")
        tree[section] = {**tree[section], name: value} if name else value
    (cell,) = plan(tmp_path, host=target, **tree).cells
    assert [reason.rule for reason in cell.reasons] == ([rule] if rule else []), cell.reasons
    assert cell.state == ("not_runnable" if rule else "run")
    assert all(message in reason.message and reason.remedy for reason in cell.reasons)


def test_of_several_partitions_one_that_has_what_is_needed_is_enough(tmp_path: Path) -> None:
    down = dataclasses.replace(BATCH, name="other", state="DOWN")
    both = dataclasses.replace(CLUSTER, partitions=(down, BATCH))
    assert [cell.state for cell in plan(tmp_path, host=both).cells] == ["run"]
    neither = dataclasses.replace(CLUSTER, partitions=(down, dataclasses.replace(down, name="third")))
    assert [r.message for c in plan(tmp_path, host=neither).cells for r in c.reasons] == [
        "partition other is DOWN: no job starts in it"
    ]


def test_packages_are_looked_for_unless_ranks_have_a_python_of_their_own(tmp_path: Path) -> None:
    def rules(target: Cluster) -> set[str]:
        fields: dict[str, Any] = {**TWO_NODES, "engine": "megatron"}
        return {reason.rule for cell in plan(tmp_path, host=target, **fields).cells for reason in cell.reasons}

    assert "host.packages" in rules(CLUSTER)
    assert "host.packages" not in rules(dataclasses.replace(CLUSTER, packages=None))


def test_a_bundle_for_which_no_allocation_lasts_is_not_runnable_as_a_whole(tmp_path: Path) -> None:
    """Four runs take an hour each, with a minute between them and ten minutes to start. They need 254 minutes, but have
    240."""
    fields: dict[str, Any] = {
        "sweep": {"grid": {**COMPILED, "training.seed": [1, 2]}},
        "resources": {"device": "cpu", "minutes_per_run": 60},
    }
    found = plan(tmp_path, host=CLUSTER, **fields)
    assert not found.bundles
    # The plan omits the eager baselines, because no graphed cell needs them any more.
    assert [(cell.label, cell.run_ids) for cell in found.cells] == [
        ("torch_compile, seed=1", ()),
        ("torch_compile, seed=2", ()),
    ]
    for cell in found.cells:
        (reason,) = cell.reasons
        assert reason.rule == "cluster.time"
        assert (
            "4 runs of 60 minutes" in reason.message
            and "254 minutes" in reason.message
            and "at most 240" in reason.message
        )
    fields["resources"] = {"device": "cpu", "minutes_per_run": 56}
    assert [len(bundle.run_ids) for bundle in plan(tmp_path, host=CLUSTER, **fields).bundles] == [4, 4]


def test_auto_is_cuda_where_slurm_knows_of_gpus(tmp_path: Path) -> None:
    assert CLUSTER.device == "cuda"
    without = dataclasses.replace(BATCH, nodes=(dataclasses.replace(ALIKE, gpus={}),))
    assert cluster(without).device == "cpu"


def test_a_plan_says_what_it_was_judged_against(tmp_path: Path) -> None:
    on_cluster, on_host = plan(tmp_path, host=CLUSTER), plan(tmp_path)
    assert (on_cluster.scheduler, on_cluster.cluster) == ("slurm", "site")
    assert (on_host.scheduler, on_host.cluster) == ("host", "")


# --- bundles --------------------------------------------------------------------------------------------------------


def test_a_bundle_is_a_workload_in_alternating_order(tmp_path: Path) -> None:
    """The order is eager, graphed, graphed, eager. A machine that is slower in every other run then slows both cells
    equally."""
    grid = {"parallelism.dp": [1, 2], "cuda_graph.impl": ["torch_compile"]}
    forwards = ("eager", "torch_compile")
    assert names(plan(tmp_path, repeats=3, sweep={"grid": grid})) == [
        [
            f"{cell}, dp={dp} {repeat}"
            for repeat, cells in enumerate((forwards, forwards[::-1], forwards))
            for cell in cells
        ]
        for dp in (1, 2)
    ]


def test_a_workload_has_one_perturbed_eager_run_after_all_repeats(tmp_path: Path) -> None:
    grid = {"training.compile": ["none", "whole"], "cuda_graph.impl": ["torch_compile"]}
    found = plan(tmp_path, perturbed=True, sweep={"grid": grid})
    perturbed = {cell.run_ids[-1]: cell for cell in found.cells if cell.perturbed}
    assert [cell.label for cell in perturbed.values()] == ["eager, compile=none", "eager, compile=whole"]
    assert all(bundle.run_ids[-1] in perturbed for bundle in found.bundles)
    assert all(len(cell.repeat_ids) == 2 for cell in found.cells) and not found.bundles_if_needed


@pytest.mark.parametrize(
    "fields",
    [
        {"repeats": 1},
        {"training": {"deterministic": True, "compile": "whole"}},
        {"equivalence": {"loss": 0, "grad_norm": 0}},
        {"fault": {"kind": "nan", "step": 5}},
        {"sweep": {"grid": {"cuda_graph.impl": ["none"]}}},
    ],
    ids=str,
)
def test_a_perturbed_run_is_planned_where_a_verdict_may_need_it(tmp_path: Path, fields: dict[str, Any]) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED})
    (eager,) = (cell for cell in found.cells if not cell.graphed)
    (bundle,) = found.bundles_if_needed
    assert (bundle.run_ids, bundle.workload_id) == (eager.run_ids[-1:], eager.workload_id)
    assert eager.perturbed and len(eager.repeat_ids) == 2
    assert [len(bundle.run_ids) for bundle in found.bundles] == [4], "it takes no time of their allocation"
    other = plan(tmp_path, **{"sweep": {"grid": COMPILED}, **fields})
    assert other.bundles and not other.bundles_if_needed and not any(cell.perturbed for cell in other.cells)


GRIDS = st.fixed_dictionaries({}, optional={
    "parallelism.dp": st.lists(st.integers(1, 8), min_size=1, max_size=3),
    "training.precision": st.lists(st.sampled_from(["fp32", "bf16"]), min_size=1, max_size=2),
    "cuda_graph.impl": st.lists(st.sampled_from(["none", "torch_compile", "torch", "local"]), min_size=1, max_size=4),
    "cuda_graph.warmup_steps": st.lists(st.integers(0, 99), min_size=1, max_size=2),
}).filter(bool)  # fmt: skip
PROPERTY = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(grid=GRIDS, repeats=st.integers(1, 4))
def test_each_run_is_in_one_bundle_and_a_plan_is_the_same_each_time(
    tmp_path: Path, grid: dict[str, Any], repeats: int
) -> None:
    found = plan(tmp_path, repeats=repeats, sweep={"grid": grid})
    assert found == plan(tmp_path, repeats=repeats, sweep={"grid": grid})

    cells = found.cell_of_run()
    placed = [run for bundle in found.all_bundles for run in bundle.run_ids]
    assert len(set(placed)) == len(placed)
    assert set(placed) == {run for cell in found.cells for run in cell.run_ids} == set(cells)
    assert len({bundle.bundle_id for bundle in found.all_bundles}) == len(found.all_bundles)
    for bundle in found.bundles:
        assert {cells[run].workload_id for run in bundle.run_ids} == {bundle.workload_id}
        width = len(bundle.run_ids) // repeats
        for repeat in range(repeats):
            turn = bundle.run_ids[repeat * width : (repeat + 1) * width]
            assert [run.endswith(f"-r{repeat}") for run in turn] == [True] * width
            graphed = [cells[run].graphed for run in turn]
            assert graphed == sorted(graphed, reverse=repeat % 2 == 1)
    assert all(any(not c.graphed for c in found.cells if c.workload_id == cell.workload_id)
               for cell in found.cells if cell.graphed and cell.state == "run")  # fmt: skip


def test_run_ids_are_those_of_the_specs(tmp_path: Path) -> None:
    for cell in plan(tmp_path, sweep={"grid": COMPILED}).cells:
        specs = [spec_from_json(cell.spec_of(number)) for number in range(len(cell.run_ids))]
        assert cell.run_ids == tuple(spec.run_id for spec in specs)
        assert cell.cell_id == specs[0].cell_id


def test_a_plan_survives_json(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": {"cuda_graph.impl": ["torch_compile", "local"]}}, expect={"outcome": "HANG"})
    for each in (found, dataclasses.replace(found, only=("training.steps=9", "cuda_graph.impl=local"))):
        assert from_json(Plan, json.loads(dumps(each))) == each


TYPED = st.sampled_from([place for place in RECIPE.fields if "." in place]).flatmap(
    lambda place: st.tuples(st.just(place), values_of(place))
)
"""Draw fields of sections, with any value of their types."""


def values_of(place: str) -> st.SearchStrategy[Any]:
    section, _, name = place.partition(".")
    schema = RECIPE.sections[section]
    if choices := schema.choices(name):
        return st.sampled_from(choices)
    kinds = {
        "a whole number": st.integers(-2, 9) | st.integers(-(2**62), 2**62),
        "a number": st.floats(allow_nan=False, allow_infinity=False),
        "true or false": st.booleans(),
        "a list of words": st.lists(st.sampled_from(["attn", "moe", "x"]), max_size=3),
    }
    return next(
        (kind for words, kind in kinds.items() if schema.describe_type(name).startswith(words)), st.just("tiny_moe")
    )


@settings(PROPERTY, max_examples=150)
@given(fields=st.lists(TYPED, min_size=1, max_size=6, unique_by=lambda item: item[0]))
def test_whatever_the_types_allow_can_be_planned(tmp_path: Path, fields: list[tuple[str, Any]]) -> None:
    tree: dict[str, Any] = {"model": {"preset": "tiny_moe"}}
    for place, value in fields:
        section, _, name = place.partition(".")
        tree.setdefault(section, {})[name] = value
    try:
        found = plan(tmp_path, **tree)
    except InputError:
        return
    assert json.loads(dumps(found))["cells"]
    gpu_hours(found)


# --- the budget -----------------------------------------------------------------------------------------------------


def test_gpu_hours_are_every_run_to_its_limit(tmp_path: Path) -> None:
    fields = {
        "resources": {"minutes_per_run": 30, "device": "cuda"},
        "parallelism": {"dp": 2},
        "training": {"precision": "bf16"},
        "repeats": 3,
    }
    found = plan(tmp_path, host=GPU_HOST, **fields)
    assert [cell.state for cell in found.cells] == ["run"]
    assert gpu_hours(found) == pytest.approx(2 * 3 * 0.5)
    assert gpu_hours(plan(tmp_path, sweep={"grid": COMPILED})) == 0


@pytest.mark.parametrize("most", [None, 3.0, 3.1])
def test_a_plan_within_its_budget_passes(most: float | None) -> None:
    check_budget(3.0, most)


@pytest.mark.parametrize("most", [0.0, 2.99, float("nan")])
def test_a_plan_beyond_its_budget_is_refused_with_both_numbers(most: float) -> None:
    with pytest.raises(InputError, match=r"3\.00 GPU hours"):
        check_budget(3.0, most)


def test_tracking_is_the_recipes_and_none_where_it_is_disabled(tmp_path: Path) -> None:
    tracking = plan(tmp_path, wandb={"project": "p", "tags": ["a"]}).tracking
    assert tracking == {
        "project": "p",
        "entity": None,
        "mode": "auto",
        "tags": ["a"],
        "group": "x",
        "tensorboard": False,
    }
    assert plan(tmp_path, wandb={"mode": "disabled"}).tracking is None
    tracking = plan(tmp_path, wandb={"mode": "disabled"}, tracking={"tensorboard": True}).tracking
    assert tracking and (tracking["mode"], tracking["tensorboard"]) == ("disabled", True)


def test_the_plan_is_of_the_specs_it_shows(tmp_path: Path) -> None:
    (cell,) = plan(tmp_path, training={"steps": 77}).cells
    assert isinstance(cell.run_spec, RunSpec)
    assert cell.run_spec.training.steps == 77


def test_a_release_of_megatron_core_that_the_recipe_is_not_for_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"megatron-core": "0.16.1", "transformer-engine": "2.11.0"}
    monkeypatch.setattr(host, "package_versions", lambda: versions)
    assert host.installed_packages() == {"megatron-core 0.16", "transformer-engine"}
    versions["megatron-core"] = "0.16"
    assert "megatron-core 0.16" in host.installed_packages()
    versions["megatron-core"] = "0.18.2"
    assert host.installed_packages() == {"transformer-engine"}
    assert "needs megatron-core 0.16, not installed here" in lacking_package().message
    versions["megatron-core"] = "0.19.2"
    reason = lacking_package()
    assert "needs megatron-core 0.16, not installed here" in reason.message
    assert "set megatron_core=0.19, which is installed, or pip install" in reason.remedy


def lacking_package() -> Reason:
    reasons = host.check_software(RunSpec(engine="megatron"), host.installed_packages())
    (reason,) = (reason for reason in reasons if reason.rule == "host.packages")
    return reason


def test_a_report_is_sent_to_trackers_once_a_run_has_begun(tmp_path: Path) -> None:
    found, paths = plan(tmp_path), SweepPaths(tmp_path / "x")
    assert found.tracking is not None and not is_tracked(paths, found)
    paths.run(found.cells[0].run_ids[0]).attempt(1).root.mkdir(parents=True)
    assert is_tracked(paths, found)
    assert not is_tracked(paths, plan(tmp_path, wandb={"mode": "disabled"}))


def test_commands_that_differ_in_numbers_alone_are_named(tmp_path: Path) -> None:
    command = {"run": "python train.py --batch={micro_batch_size} --seq {sequence_length}", "graphs": {"none": [], "one": ["--graphs"]}}  # fmt: skip
    grid = {"training.micro_batch_size": [1, 2], "environment": [{}, {"OMP_NUM_THREADS": 2}]}
    found = plan(tmp_path, engine="command", command=command, sweep={"grid": grid})
    first = {cell.cell_id: cell.same_command for cell in found.cells}
    named = {
        (cell.graphed, bool(cell.spec["environment"])): cell.cell_id for cell in found.cells if not cell.same_command
    }
    assert len(first) == 8 and len(named) == 4
    for cell in found.cells:
        assert first[cell.cell_id] in ("", named[cell.graphed, bool(cell.spec["environment"])])
    graphed = next(cell for cell in found.cells if cell.graphed and cell.same_command)
    eager = next(cell for cell in found.cells if not cell.graphed and cell.workload_id == graphed.workload_id)
    assert found.precedents[graphed.cell_id] == Precedents(eager.cell_id, (graphed.same_command, eager.same_command))
    assert found.precedents[eager.cell_id] == Precedents("", (eager.same_command,))
