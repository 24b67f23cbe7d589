"""Planning: cells judged, bundles formed and interleaved, attempts ordered by policy."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.common.atomic_files import dumps
from launch.contract.bundle import Step, order_from_json, order_to_json
from launch.contract.outcomes import OUTCOMES, Outcome
from launch.contract.plan import Plan, plan_from_json, plan_to_json
from launch.contract.spec import RunSpec, spec_from_json
from orchestrator.errors import InputError
from orchestrator.plan.planner import (
    MOST_ATTEMPTS,
    Policy,
    Target,
    attempts_to_begin,
    check_budget,
    gpu_hours,
    make_plan,
)
from orchestrator.recipe.expand import expand, filter_cells
from orchestrator.recipe.fields import FIELDS, SCHEMAS
from orchestrator.recipe.recipe import load
from orchestrator.slurm.job_listing import Job
from orchestrator.sweeps.postmortem import MOST_LAUNCHES
from orchestrator.sweeps.run_state import RunState, StateName
from orchestrator.targets import host
from orchestrator.targets.host import Host
from orchestrator.targets.partition import Nodes, Partition
from orchestrator.targets.profile import Profile
from orchestrator.targets.slurm_cluster import Cluster

CPU_HOST = Host((), 2, frozenset(), has_compiler=True)
GPU_HOST = Host(("0", "1"), 8, frozenset(), has_compiler=True)
ALIKE = Nodes(4, cpus=16, megabytes=64000, features=frozenset({"h100", "ib"}), gpus={"h100": 8})
BATCH = Partition("batch", True, "UP", 240.0, 1, 3, (ALIKE, Nodes(1, cpus=64, megabytes=512000)))
CLUSTER = Cluster(Profile("site"), (BATCH,), 1001, frozenset())
COMPILED = {"cuda_graph.impl": ["torch_compile"]}


def plan(folder: Path, *, host: Target = CPU_HOST, only: Sequence[str] = (), **fields: Any) -> Plan:
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "model": "tiny_moe", **fields}, sort_keys=False))
    recipe = load(path)
    return make_plan(recipe, filter_cells(expand(recipe, host.device), only), host)


def names(plan: Plan) -> list[list[str]]:
    """The runs of each bundle by label and repeat: "eager 0"."""
    cells = plan.cell_of_run()
    return [[f"{cells[run].label} {run.rpartition('-r')[2]}" for run in bundle.run_ids] for bundle in plan.bundles]


# --- cells ----------------------------------------------------------------------------------------------------------


def test_each_cell_is_run_rejected_or_not_runnable_and_says_why(tmp_path: Path) -> None:
    impls = ["torch_compile", "full_iteration", "local"]
    found = plan(tmp_path, sweep={"grid": {"cuda_graph.impl": impls}})
    assert [(cell.label, cell.state, [reason.rule for reason in cell.reasons][:1]) for cell in found.cells] == [
        ("eager", "run", []),
        ("torch_compile", "run", []),
        ("full_iteration", "not_runnable", ["host.cuda"]),
        ("local", "rejected", ["scope.impl_engine"]),
    ]
    for cell in found.cells:
        assert bool(cell.run_ids) == (cell.state == "run")
        assert all(reason.message and reason.remedy for reason in cell.reasons)


def test_a_twin_that_serves_nobody_is_left_out_unless_it_was_asked_for(tmp_path: Path) -> None:
    grid = {"cuda_graph.impl": ["full_iteration"]}
    assert [cell.label for cell in plan(tmp_path, sweep={"grid": grid}).cells] == ["full_iteration"]
    grid = {"cuda_graph.impl": ["full_iteration", "none"]}
    assert [cell.label for cell in plan(tmp_path, sweep={"grid": grid}).cells] == ["eager", "full_iteration"]
    alone = plan(tmp_path, sweep={"grid": COMPILED}, only=["cuda_graph.impl=none"])
    assert names(alone) == [["eager 0", "eager 1"]]


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
    both = dataclasses.replace(GPU_HOST, packages=frozenset({"megatron-core", "transformer-engine"}))
    assert not lacking(both, engine="megatron", training={"precision": "bf16"})
    offloading = {"precision": "bf16", "cpu_offloading": True}
    assert lacking(both, engine="megatron", training=offloading) == {"megatron.cpu_offloading"}
    assert not lacking(CPU_HOST, sweep={"grid": COMPILED})


def cluster(partition: Partition = BATCH, **fields: Any) -> Cluster:
    return dataclasses.replace(CLUSTER, profile=Profile("site", **fields), partitions=(partition,))


TWO_NODES: Mapping[str, Any] = {
    "resources": {"nodes": 2, "gpus_per_node": 8, "device": "cuda"},
    "training": {"precision": "bf16", "global_batch_size": 96},
}
LACKING: Mapping[str, tuple[Cluster, dict[str, Any], str, str]] = {
    # cluster, fields of the recipe (beside two nodes of eight GPUs), the reason and what it says
    "enough": (cluster(), {}, "", ""),
    "a feature that is there": (cluster(constraint="h100"), {}, "", ""),
    "an expression of features is Slurm's to judge": (cluster(constraint="h100&nvl"), {}, "", ""),
    "a partition that is down": (
        cluster(dataclasses.replace(BATCH, state="DOWN")), {}, "cluster.partition", "partition batch is DOWN"),
    "more nodes than there are": (
        cluster(), {"resources.nodes": 6}, "cluster.nodes", "6 nodes are needed, and partition batch has 4 that are"),
    "more CPU nodes than there are": (
        cluster(), {"resources": {"nodes": 6, "gpus_per_node": 1, "device": "cpu"}}, "cluster.nodes", "6 nodes are needed, and partition batch has 5"),
    "more nodes than a job may have": (
        cluster(), {"resources.nodes": 4}, "cluster.nodes", "4 nodes are needed, and partition batch gives a job 1 at least and 3 at most"),
    "fewer nodes than a job must have": (
        cluster(dataclasses.replace(BATCH, min_nodes=3)), {}, "cluster.nodes", "gives a job 3 at least"),
    "a feature that no node has": (
        cluster(constraint="a100"), {}, "cluster.nodes", "there is no node in partition batch with feature a100"),
    "more GPUs than a node has": (
        cluster(), {"resources": {"nodes": 1, "gpus_per_node": 16, "device": "cuda"}}, "cluster.gpus", "16 GPUs a node are needed, and nodes of partition batch have 8"),
    "GPUs of another type": (
        cluster(gpu_type="a100"), {}, "cluster.gpus", "8 GPUs of type a100 a node are needed, and nodes of partition batch have 0"),
    "more CPUs than a node has": (
        cluster(cpus_per_task=12), {}, "cluster.cpus", "96 CPUs a node are needed, and nodes of partition batch have 64"),
    "more CPUs than a node with GPUs has": (
        cluster(cpus_per_task=4), {}, "cluster.nodes", "partition batch has 0 that are large enough"),
    "more memory than a node has": (
        cluster(mem="1T"), {}, "cluster.memory", "1,048,576 MB of memory a node are needed, and nodes of partition batch have 512,000"),
    "a model that no GPU holds": (
        cluster(gpu_memory_gib=0.0001), {}, "cluster.gpu_memory", "GiB before anything is computed, and gpu_memory_gib of the profile is 0.0001"),
    "a model that a GPU may hold": (cluster(gpu_memory_gib=80), {}, "", ""),
    "more nodes than the profile allows": (
        cluster(max_nodes=1), {}, "cluster.max_nodes", "2 nodes are needed, and the profile lets a sweep hold 1"),
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
    """Four runs of an hour, a minute each between them and ten to start: 254 minutes, of 240."""
    fields: dict[str, Any] = {
        "sweep": {"grid": {**COMPILED, "training.seed": [1, 2]}},
        "resources": {"device": "cpu", "minutes_per_run": 60},
    }
    found = plan(tmp_path, host=CLUSTER, **fields)
    assert not found.bundles
    # The eager twins serve nobody any more.
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
            and "240 at most" in reason.message
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


def test_a_bundle_is_a_workload_interleaved_eager_first_in_each_repeat(tmp_path: Path) -> None:
    grid = {"parallelism.dp": [1, 2], "cuda_graph.impl": ["torch_compile"]}
    assert names(plan(tmp_path, repeats=3, sweep={"grid": grid})) == [
        [f"{cell}, dp={dp} {repeat}" for repeat in range(3) for cell in ("eager", "torch_compile")] for dp in (1, 2)
    ]


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
    placed = [run for bundle in found.bundles for run in bundle.run_ids]
    assert len(set(placed)) == len(placed)
    assert set(placed) == {run for cell in found.cells for run in cell.run_ids} == set(cells)
    assert len({bundle.bundle_id for bundle in found.bundles}) == len(found.bundles)
    for bundle in found.bundles:
        assert {cells[run].workload_id for run in bundle.run_ids} == {bundle.workload_id}
        width = len(bundle.run_ids) // repeats
        for repeat in range(repeats):
            turn = bundle.run_ids[repeat * width : (repeat + 1) * width]
            assert [run.endswith(f"-r{repeat}") for run in turn] == [True] * width
            assert [cells[run].graphed for run in turn] == sorted(cells[run].graphed for run in turn)
    assert all(any(not c.graphed for c in found.cells if c.workload_id == cell.workload_id)
               for cell in found.cells if cell.graphed and cell.state == "run")  # fmt: skip


def test_run_ids_are_those_of_the_specs(tmp_path: Path) -> None:
    for cell in plan(tmp_path, sweep={"grid": COMPILED}).cells:
        specs = [spec_from_json({**cell.spec, "repeat": repeat}) for repeat in range(2)]
        assert cell.run_ids == tuple(spec.run_id for spec in specs)
        assert cell.cell_id == specs[0].cell_id


def test_a_plan_survives_json(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": {"cuda_graph.impl": ["torch_compile", "local"]}}, expect={"outcome": "HANG"})
    for each in (found, dataclasses.replace(found, only=("training.steps=9", "cuda_graph.impl=local"))):
        assert plan_from_json(json.loads(dumps(plan_to_json(each)))) == each


TYPED = st.sampled_from([place for place in FIELDS if "." in place]).flatmap(
    lambda place: st.tuples(st.just(place), values_of(place))
)
"""Fields of sections, with any value of their types."""


def values_of(place: str) -> st.SearchStrategy[Any]:
    section, _, name = place.partition(".")
    schema = SCHEMAS[section]
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
    assert json.loads(dumps(plan_to_json(found)))["cells"]
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


# --- what is to be attempted ----------------------------------------------------------------------------------------

# State of each run, in a bundle of two repeats: eager 0, compiled 0, eager 1, compiled 1.
#   . planned   + completed as expected   ! ended otherwise   i interrupted   c cancelled   r running
#   n its node failed   a ordered, and its job ended before it began
STATES: Mapping[str, tuple[StateName, bool, bool]] = {  # name, ended, expected
    ".": ("PLANNED", False, True),
    "+": ("COMPLETED", True, True),
    "!": ("CUDA_OOM", True, False),
    "i": ("INTERRUPTED", False, True),
    "c": ("CANCELLED", False, True),
    "r": ("RUNNING", False, True),
    "n": ("NODE_FAIL", True, False),
}
ORDERS: list[tuple[str, str, str, str]] = [
    # states, and what each policy attempts: new, unfinished, failed (x: attempted)
    ("....", "xxxx", "xxxx", "xxxx"),
    ("++++", "", "", ""),
    ("++..", "  xx", "  xx", "  xx"),
    ("+.++", "xx", "xx", "xx"),  # a graphed run takes its eager twin along
    (".+++", "xx", "xx", "xx"),  # an eager run takes the graphed ones of its repeat along
    ("+!++", "", "", "xx"),
    ("!+++", "", "", "xx"),
    ("+++!", "", "", "  xx"),
    ("!!!!", "", "", "xxxx"),
    ("+i++", "", "xx", "xx"),
    ("i...", "xxxx", "xxxx", "xxxx"),
    ("ii++", "", "xx", "xx"),
    ("++c.", "  xx", "  xx", "  xx"),
    ("cccc", "", "xxxx", "xxxx"),
    ("+!i+", "", "  xx", "xxxx"),
    ("+r!.", "", "", ""),  # a living supervisor is not interfered with
    ("+n++", "", "xx", "xx"),  # what the infrastructure ended counts as interrupted
    ("+n!+", "", "xx", "xxxx"),
]


@pytest.mark.parametrize(("states", "new", "unfinished", "failed"), ORDERS)
def test_the_retry_policy(tmp_path: Path, states: str, new: str, unfinished: str, failed: str) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED})
    (bundle,) = found.bundles
    known = {run: state(run, sign) for run, sign in zip(bundle.run_ids, states, strict=True)}
    policies: tuple[Policy, ...] = ("new", "unfinished", "failed")
    for policy, expected in zip(policies, (new, unfinished, failed), strict=True):
        made = attempts_to_begin(found, known, CPU_HOST, policy)
        wanted = [run for run, sign in zip(bundle.run_ids, expected.ljust(4), strict=True) if sign == "x"]
        assert [run for order in made for run, _ in order.schedule] == wanted, policy
        for order in made:
            assert dict(order.schedule) == {run: known[run].next_attempt for run in wanted}


def state(run: str, sign: str, attempt: int = 3) -> RunState:
    if sign == "a":
        return RunState(run, "PLANNED", attempt, job=Job("7", "x", "NODE_FAIL"), abandoned=True, launches=1)
    name, ended, expected = STATES[sign]
    outcome = Outcome(cast(Any, name), "measure", "a", 0.0, 1.0) if ended else None
    return RunState(run, name, attempt, sign == "r", outcome, expected)


UNASKED: list[tuple[str, str]] = [
    # states, and what a command that watches begins again by itself (x)
    ("....", ""),  # nobody has asked for these yet
    ("aaaa", "xxxx"),
    ("++aa", "  xx"),
    ("+n++", "xx"),  # its eager twin beside it
    ("n+++", "xx"),
    ("n!++", "x"),  # a failure of its own is a result: not made again, as a partner neither
    ("!n++", " x"),
    ("+!!+", ""),
    ("+nc.", "xx"),
    ("ci++", ""),
    ("+ann", "xxxx"),
    ("rnaa", ""),
]


@pytest.mark.parametrize(("signs", "expected"), UNASKED)
def test_only_what_the_infrastructure_ended_is_made_again_unasked(tmp_path: Path, signs: str, expected: str) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED})
    runs = found.bundles[0].run_ids
    known = {run: state(run, sign, attempt=2) for run, sign in zip(runs, signs, strict=True)}
    made = attempts_to_begin(found, known, CLUSTER, "infrastructure")
    wanted = [run for run, sign in zip(runs, expected.ljust(4), strict=True) if sign == "x"]
    assert [pair for order in made for pair in order.schedule] == [(run, known[run].next_attempt) for run in wanted]


def test_unasked_a_run_is_made_and_submitted_so_often_and_no_more(tmp_path: Path) -> None:
    found = plan(tmp_path)
    (run, other) = found.bundles[0].run_ids

    def made_again(**fields: Any) -> bool:
        known = {run: dataclasses.replace(state(run, "n", 2), **fields), other: state(other, "+")}
        return bool(attempts_to_begin(found, known, CLUSTER, "infrastructure"))

    assert made_again(next_attempt=MOST_ATTEMPTS)
    assert not made_again(next_attempt=MOST_ATTEMPTS + 1)
    assert made_again(abandoned=True, launches=MOST_LAUNCHES - 1)
    assert not made_again(abandoned=True, launches=MOST_LAUNCHES)
    assert not made_again(expected=True)
    assert not made_again(outcome=Outcome("ENVIRONMENT", "init", "", 0.0, 1.0, failure_class="LAUNCH")), "given up"


@PROPERTY
@given(signs=st.text(st.sampled_from(".+!icna"), min_size=6, max_size=6), data=st.data())
def test_retries_unasked_come_to_an_end_whatever_fails(tmp_path: Path, signs: str, data: st.DataObject) -> None:
    found = plan(tmp_path, repeats=3, sweep={"grid": COMPILED})
    runs = found.bundles[0].run_ids
    known = {run: state(run, sign, attempt=2) for run, sign in zip(runs, signs, strict=True)}
    results = {run for run, sign in zip(runs, signs, strict=True) if sign == "!"}
    for _ in range(2 * MOST_ATTEMPTS * MOST_LAUNCHES * len(runs)):
        made = attempts_to_begin(found, known, CLUSTER, "infrastructure")
        if not made:
            return
        assert results.isdisjoint(run for run, _ in made[0].schedule)
        for run, number in made[0].schedule:
            ending = data.draw(st.sampled_from("nna!+"))
            if ending == "a":
                known[run] = dataclasses.replace(known[run], abandoned=True, launches=known[run].launches + 1)
            else:
                known[run] = state(run, ending, number + 1)
            results |= {run} if ending == "!" else set()
    raise AssertionError(f"not over: {known}")


def test_a_retried_graphed_run_takes_its_eager_twin_and_no_other_graphed_run(tmp_path: Path) -> None:
    """Three cells of one workload, in an order that orders() knows from bundles alone."""
    found = plan(tmp_path, sweep={"grid": COMPILED})
    eager, compiled = found.cells
    third = dataclasses.replace(compiled, cell_id="third", label="third", run_ids=("third-r0", "third-r1"))
    runs = tuple(run for repeat in zip(eager.run_ids, compiled.run_ids, third.run_ids, strict=True) for run in repeat)
    bundle = dataclasses.replace(found.bundles[0], run_ids=runs)
    wide = dataclasses.replace(found, cells=(eager, compiled, third), bundles=(bundle,))

    def attempted(signs: str) -> list[str]:
        known = {run: state(run, sign) for run, sign in zip(runs, signs, strict=True)}
        return [run for order in attempts_to_begin(wide, known, CPU_HOST, "failed") for run, _ in order.schedule]

    assert attempted("++++!+") == [runs[3], runs[4]]
    assert attempted("!+++++") == list(runs[:3])
    assert attempted("++!+!+") == [runs[0], runs[2], runs[3], runs[4]]


@pytest.mark.parametrize("outcome", [name for name in OUTCOMES if name != "CANCELLED"])
def test_an_outcome_that_is_expected_is_not_retried(tmp_path: Path, outcome: Any) -> None:
    found = plan(tmp_path)
    known = {
        run: RunState(run, outcome, 2, False, Outcome(outcome, "measure", "a", 0.0, 1.0), expected=True)
        for run in found.bundles[0].run_ids
    }
    assert attempts_to_begin(found, known, CPU_HOST, "failed") == ()


def test_bundles_are_ordered_apart(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": {**COMPILED, "parallelism.dp": [1, 2]}})
    first, second = found.bundles
    known = {run: state(run, "r" if run in first.run_ids else ".") for run in found.cell_of_run()}
    (order,) = attempts_to_begin(found, known, CPU_HOST, "new")
    assert order.bundle_id == second.bundle_id
    assert order.workload_id == second.workload_id


def test_an_order_takes_the_slots_and_limits_of_its_cells(tmp_path: Path) -> None:
    resources = {"minutes_per_run": 2, "hang_minutes": 1}
    (cpu,) = planned_orders(plan(tmp_path, parallelism={"dp": 2}, resources=resources), CPU_HOST)
    assert (cpu.slots, cpu.slot_names) == (1, ("cpu",))
    assert (cpu.limits.run_seconds, cpu.limits.hang_seconds) == (120.0, 60.0)
    gpu = plan(tmp_path, host=GPU_HOST, parallelism={"dp": 2}, training={"precision": "bf16"})
    (order,) = planned_orders(gpu, GPU_HOST)
    assert (order.slots, order.slot_names) == (2, ("0", "1"))


def test_an_order_for_a_cluster_says_how_ranks_start(tmp_path: Path) -> None:
    profile = Profile(
        "site", mpi="pmix", cpus_per_task=2, environment={"NCCL_X": "1"}, srun=("--cpu-bind=none",),
        container_image="img", container_mounts=("/data:/data:ro",),
    )  # fmt: skip
    target = dataclasses.replace(CLUSTER, profile=profile, folders=("/code", "/store"))
    (order,) = planned_orders(plan(tmp_path, host=target, **TWO_NODES), target)
    assert (order.slots, order.slot_names, order.environment) == (0, (), {"NCCL_X": "1"})
    mounts = "--container-mounts=/code:/code,/store:/store,/data:/data:ro"
    arguments = ("--mpi=pmix", "--container-image=img", mounts, "--cpu-bind=none")
    assert order.step == Step(2, 8, 2, "python3", arguments)
    assert order_from_json(json.loads(dumps(order_to_json(order)))) == order
    (plain,) = planned_orders(plan(tmp_path, host=CLUSTER), CLUSTER)
    assert plain.step == Step(1, 1, 1, sys.executable, ("--mpi=none",))


def test_what_was_planned_is_not_ordered_of_a_cluster_that_cannot_hold_it(tmp_path: Path) -> None:
    found = plan(tmp_path, host=CLUSTER)
    drained, brief = dataclasses.replace(BATCH, state="DRAIN"), dataclasses.replace(BATCH, max_minutes=30.0)
    with pytest.raises(InputError, match="partition batch is DRAIN"):
        planned_orders(found, cluster(drained))
    with pytest.raises(InputError, match="an allocation of 72 minutes, and partition batch gives 30 at most"):
        planned_orders(found, cluster(brief))


def planned_orders(found: Plan, host: Target) -> tuple[Any, ...]:
    return attempts_to_begin(found, {run: state(run, ".", 1) for run in found.cell_of_run()}, host, "new")


def test_tracking_is_the_recipes_and_none_where_it_is_disabled(tmp_path: Path) -> None:
    tracking = plan(tmp_path, wandb={"project": "p", "tags": ["a"]}).tracking
    assert tracking == {"project": "p", "entity": None, "mode": "auto", "tags": ["a"], "group": "x"}
    assert plan(tmp_path, wandb={"mode": "disabled"}).tracking is None


def test_the_plan_is_of_the_specs_it_shows(tmp_path: Path) -> None:
    (cell,) = plan(tmp_path, training={"steps": 77}).cells
    assert isinstance(cell.run_spec, RunSpec)
    assert cell.run_spec.training.steps == 77


def test_a_release_of_megatron_core_that_the_engine_is_not_of_counts_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"megatron-core": "0.16.1", "transformer-engine": "2.11.0"}
    monkeypatch.setattr(host.metadata, "version", lambda name: versions[name])
    assert host.installed_packages() == {"megatron-core", "transformer-engine"}
    versions["megatron-core"] = "0.16"
    assert "megatron-core" in host.installed_packages()
    versions["megatron-core"] = "0.18.2"
    assert host.installed_packages() == {"transformer-engine"}
    spec = RunSpec(engine="megatron")
    (reason,) = host.lacks_packages(spec, host.installed_packages())
    assert "needs megatron-core 0.16, not installed here" in reason.message
