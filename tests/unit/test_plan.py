"""Planning: cells judged, bundles formed and interleaved, attempts ordered by policy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.files import dumps
from launch.record import OUTCOMES, Outcome, Plan, plan_from_json, plan_to_json
from launch.spec import RunSpec, spec_from_json
from orchestrator.errors import InputError
from orchestrator.fields import FIELDS, SCHEMAS
from orchestrator.host import Host
from orchestrator.plan import Policy, check_budget, gpu_hours, make_plan, orders
from orchestrator.recipe import load
from orchestrator.state import RunState, StateName
from orchestrator.sweep import expand, pick

CPU_HOST = Host((), 2, frozenset(), has_compiler=True)
GPU_HOST = Host(("0", "1"), 8, frozenset(), has_compiler=True)
COMPILED = {"cuda_graph.impl": ["torch_compile"]}


def plan(folder: Path, *, host: Host = CPU_HOST, only: Sequence[str] = (), **fields: Any) -> Plan:
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "model": "tiny_moe", **fields}, sort_keys=False))
    recipe = load(path)
    return make_plan(recipe, pick(expand(recipe, host.device), only), host)


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

    assert "host.compiler" in lacking(dataclasses.replace(CPU_HOST, has_compiler=False), sweep={"grid": COMPILED})
    assert "host.gpus" in lacking(CPU_HOST, resources={"device": "cuda"})
    assert "host.gpus" in lacking(GPU_HOST, parallelism={"dp": 4})
    assert "host.nodes" in lacking(CPU_HOST, parallelism={"dp": 2}, resources={"nodes": 2})
    assert "host.packages" in lacking(GPU_HOST, engine="megatron", training={"precision": "bf16"})
    assert not lacking(CPU_HOST, sweep={"grid": COMPILED})


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
PROPERTY = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


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
    assert plan_from_json(json.loads(dumps(plan_to_json(found)))) == found


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
    return next((kind for words, kind in kinds.items() if schema.takes(name).startswith(words)), st.just("tiny_moe"))


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
STATES: Mapping[str, tuple[StateName, bool, bool]] = {  # name, ended, expected
    ".": ("PLANNED", False, True),
    "+": ("COMPLETED", True, True),
    "!": ("CUDA_OOM", True, False),
    "i": ("INTERRUPTED", False, True),
    "c": ("CANCELLED", False, True),
    "r": ("RUNNING", False, True),
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
]


@pytest.mark.parametrize(("states", "new", "unfinished", "failed"), ORDERS)
def test_the_retry_policy(tmp_path: Path, states: str, new: str, unfinished: str, failed: str) -> None:
    found = plan(tmp_path, sweep={"grid": COMPILED})
    (bundle,) = found.bundles
    known = {run: state(run, sign) for run, sign in zip(bundle.run_ids, states, strict=True)}
    for policy, expected in zip(get_args(Policy), (new, unfinished, failed), strict=True):
        made = orders(found, known, CPU_HOST, policy)
        wanted = [run for run, sign in zip(bundle.run_ids, expected.ljust(4), strict=True) if sign == "x"]
        assert [run for order in made for run, _ in order.schedule] == wanted, policy
        for order in made:
            assert dict(order.schedule) == {run: known[run].next_attempt for run in wanted}


def state(run: str, sign: str, attempt: int = 3) -> RunState:
    name, ended, expected = STATES[sign]
    outcome = Outcome(cast(Any, name), "measure", "a", 0.0, 1.0) if ended else None
    return RunState(run, name, attempt, sign == "r", outcome, expected)


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
        return [run for order in orders(wide, known, CPU_HOST, "failed") for run, _ in order.schedule]

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
    assert orders(found, known, CPU_HOST, "failed") == ()


def test_bundles_are_ordered_apart(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": {**COMPILED, "parallelism.dp": [1, 2]}})
    first, second = found.bundles
    known = {run: state(run, "r" if run in first.run_ids else ".") for run in found.cell_of_run()}
    (order,) = orders(found, known, CPU_HOST, "new")
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


def planned_orders(found: Plan, host: Host) -> tuple[Any, ...]:
    return orders(found, {run: state(run, ".", 1) for run in found.cell_of_run()}, host, "new")


def test_tracking_is_the_recipes_and_none_where_it_is_disabled(tmp_path: Path) -> None:
    tracking = plan(tmp_path, wandb={"project": "p", "tags": ["a"]}).tracking
    assert tracking == {"project": "p", "entity": None, "mode": "auto", "tags": ["a"], "group": "x"}
    assert plan(tmp_path, wandb={"mode": "disabled"}).tracking is None


def test_the_plan_is_of_the_specs_it_shows(tmp_path: Path) -> None:
    (cell,) = plan(tmp_path, training={"steps": 77}).cells
    assert isinstance(cell.run_spec, RunSpec)
    assert cell.run_spec.training.steps == 77
