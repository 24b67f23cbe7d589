"""Test the expansion: it gives the whole product, each cell once, with its eager baseline. Test the selection of cells
too."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.contract.outcomes import Expectation
from launch.contract.spec import Model
from orchestrator.errors import InputError
from orchestrator.recipe.expand import ResolvedCell, expand, filter_cells
from orchestrator.recipe.recipe import Recipe, load

PROPERTY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(folder: Path, **fields: Any) -> Recipe:
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump({"name": "x", "model": "tiny_moe", **fields}, sort_keys=False))
    return load(path)


def cells(folder: Path, **fields: Any) -> tuple[ResolvedCell, ...]:
    return expand(read(folder, **fields), "cpu")


def labels(found: tuple[ResolvedCell, ...]) -> list[str]:
    return [cell.label for cell in found]


# Axes over fields that cannot collide. All values differ.
AXES = {
    "training.seed": st.integers(0, 10**6),
    "training.learning_rate": st.floats(1e-6, 1.0),
    "training.precision": st.sampled_from(["fp32", "bf16"]),
    "parallelism.dp": st.integers(1, 8),
    "cuda_graph.impl": st.sampled_from(["none", "torch_compile", "torch", "full_iteration"]),
    "cuda_graph.warmup_steps": st.integers(1, 9),
    "environment.NCCL_X": st.sampled_from(["0", "1", "2"]),
    "model.num_layers": st.integers(1, 9),
}
GRIDS = st.lists(st.sampled_from(sorted(AXES)), unique=True, max_size=3).flatmap(
    lambda keys: st.fixed_dictionaries({key: st.lists(AXES[key], min_size=1, max_size=3, unique=True) for key in keys})
)
POINTS = st.lists(
    st.fixed_dictionaries({"data.kind": st.sampled_from(["text", "synthetic"]), "training.steps": st.integers(10, 13)}),
    min_size=1, max_size=3, unique_by=lambda point: tuple(sorted(point.items())),
)  # fmt: skip


@PROPERTY
@given(grid=GRIDS, points=st.none() | POINTS)
def test_the_product_is_whole_and_without_duplicates(
    tmp_path: Path, grid: dict[str, list[Any]], points: list[dict[str, Any]] | None
) -> None:
    sweep = ({"grid": grid} if grid else {}) | ({"points": points} if points else {})
    found = cells(tmp_path, **({"sweep": sweep} if sweep else {}))
    ids = [cell.spec.cell_id for cell in found]
    assert len(set(ids)) == len(ids)

    asked = [cell for cell in found if not cell.is_added_baseline]
    assert len(asked) == math.prod(map(len, grid.values())) * len(points or [0])
    wanted = Counter(
        tuple(sorted((*zip(grid, values, strict=True), *(point or {}).items())))
        for values in itertools.product(*grid.values())
        for point in points or [{}]
    )
    keys = sorted([*grid, *(points[0] if points else ())])
    assert Counter(tuple((key, value_of(cell, key)) for key in keys) for cell in asked) == wanted

    for cell in found:
        twins = [other for other in found if other.spec.workload_id == cell.spec.workload_id and not other.spec.graphed]
        assert len(twins) == 1
        assert found.index(twins[0]) <= found.index(cell)
    assert all(cell.spec.cuda_graph.impl == "none" for cell in found if cell.is_added_baseline)


def value_of(cell: ResolvedCell, key: str) -> Any:
    section, _, name = key.partition(".")
    part = getattr(cell.spec, section)
    return part[name] if section == "environment" else getattr(part, name)


@PROPERTY
@given(grid=GRIDS, random=st.randoms())
def test_neither_the_order_of_keys_nor_nesting_makes_other_cells(
    tmp_path: Path, grid: dict[str, Any], random: Any
) -> None:
    fields = {"training": {"steps": 50, "clip_grad": 0.5}, "cuda_graph": {"impl": "torch"}, "sweep": {"grid": grid}}
    fields = {key: value for key, value in fields.items() if key != "sweep" or grid}
    shuffled = list(fields.items())
    random.shuffle(shuffled)
    dotted = {"training.clip_grad": 0.5, "cuda_graph_impl": "torch", "training.steps": 50}
    if grid:
        keys = list(grid)
        random.shuffle(keys)
        dotted["sweep"] = {"grid": {key: grid[key] for key in keys}}
    ids = {cell.spec.cell_id for cell in cells(tmp_path, **fields)}
    assert {cell.spec.cell_id for cell in cells(tmp_path, **dict(shuffled))} == ids
    assert {cell.spec.cell_id for cell in cells(tmp_path, **dotted)} == ids


def test_a_preset_is_the_model_written_out(tmp_path: Path) -> None:
    (by_name,) = cells(tmp_path)
    written = dataclasses.asdict(by_name.spec.model)
    assert written.pop("preset") == "tiny_moe"
    (written_out,) = cells(tmp_path, model=written)
    assert written_out.spec.run_id == by_name.spec.run_id
    assert written_out.spec.workload_id == by_name.spec.workload_id
    (other,) = cells(tmp_path, model={"preset": "tiny_moe", "num_layers": 1})
    assert other.spec.model == dataclasses.replace(by_name.spec.model, num_layers=1)


def test_fields_of_a_preset_stand_below_those_of_the_recipe_and_of_its_axes(tmp_path: Path) -> None:
    grid = {"model": ["tiny_dense", {"preset": "tiny_moe", "num_layers": 3}]}
    dense, moe = cells(tmp_path, model={"hidden_size": 32}, sweep={"grid": grid})
    assert (dense.spec.model.hidden_size, dense.spec.model.is_moe) == (32, False)
    assert (moe.spec.model.hidden_size, moe.spec.model.is_moe, moe.spec.model.num_layers) == (32, True, 3)
    assert labels((dense, moe)) == ["eager, preset=tiny_dense", "eager, preset=tiny_moe, num_layers=3"]


def test_without_a_sweep_there_is_one_cell_and_its_twin(tmp_path: Path) -> None:
    assert labels(cells(tmp_path)) == ["eager"]
    assert labels(cells(tmp_path, cuda_graph={"impl": "torch_compile"})) == ["eager", "torch_compile"]


def test_a_twin_that_was_asked_for_is_none(tmp_path: Path) -> None:
    grid = {"cuda_graph.impl": ["torch_compile", "none"]}
    assert [(cell.label, cell.is_added_baseline) for cell in cells(tmp_path, sweep={"grid": grid})] == [
        ("eager", False),
        ("torch_compile", False),
    ]


def test_an_eager_cell_with_a_scope_is_no_twin(tmp_path: Path) -> None:
    """A grid over implementations and scopes has such cells. The rules reject them, and pairs need a valid eager
    baseline."""
    grid = {"cuda_graph.impl": ["none", "torch"], "cuda_graph.scope": [["attn"]]}
    found = cells(tmp_path, sweep={"grid": grid})
    assert [(cell.spec.cuda_graph.impl, cell.spec.cuda_graph.scope, cell.is_added_baseline) for cell in found] == [
        ("none", (), True),
        ("none", ("attn",), False),
        ("torch", ("attn",), False),
    ]


def test_one_twin_serves_all_graphed_cells_of_a_workload(tmp_path: Path) -> None:
    found = cells(tmp_path, sweep={"grid": {"parallelism.dp": [1, 2], "cuda_graph.impl": ["torch", "torch_compile"]}})
    assert labels(found) == [
        "eager, dp=1", "torch, dp=1", "torch_compile, dp=1", "eager, dp=2", "torch, dp=2", "torch_compile, dp=2",
    ]  # fmt: skip


def test_labels_tell_cells_apart(tmp_path: Path) -> None:
    grid = {"cuda_graph.impl": ["torch"], "cuda_graph.warmup_steps": [3, 10], "environment.NCCL_X": ["0", "1"]}
    found = labels(cells(tmp_path, sweep={"grid": grid}))
    assert len(set(found)) == len(found) == 8
    assert found[:2] == ["eager, warmup_steps=3, NCCL_X=0", "torch, warmup_steps=3, NCCL_X=0"]


def test_what_does_not_vary_is_not_in_a_label(tmp_path: Path) -> None:
    grid = {"parallelism.dp": [2], "training.precision": ["fp32", "bf16"]}
    assert labels(cells(tmp_path, sweep={"grid": grid})) == ["eager, precision=fp32", "eager, precision=bf16"]


# --- what is expected -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "of_twin"), [("capture", "COMPLETED"), ("warmup", "CUDA_OOM"), (None, "COMPLETED")])
def test_what_is_expected_before_the_capture_is_expected_of_the_twin(
    tmp_path: Path, phase: str | None, of_twin: str
) -> None:
    expect = {"outcome": "CUDA_OOM", "phase": phase}
    eager, graphed = cells(tmp_path, cuda_graph={"impl": "torch"}, expect=expect)
    assert graphed.expect == Expectation(**expect)
    assert eager.expect.outcome == of_twin


def test_points_may_expect_different_outcomes(tmp_path: Path) -> None:
    points = [{"cuda_graph.impl": "torch"}, {"cuda_graph.impl": "full_iteration", "expect.outcome": "CUDA_OOM"}]
    found = cells(tmp_path, sweep={"points": points})
    assert [(cell.label, cell.expect.outcome) for cell in found] == [
        ("eager", "COMPLETED"), ("torch", "COMPLETED"), ("full_iteration", "CUDA_OOM"),
    ]  # fmt: skip


@pytest.mark.parametrize("key", ["expect.outcome", "resources.minutes_per_run"])
def test_one_run_cannot_have_two_expectations_or_limits(tmp_path: Path, key: str) -> None:
    values = ["FAILED", "HANG"] if key.startswith("expect") else [1, 2]
    with pytest.raises(InputError, match=r"r\.yaml: sweep: two points are the same run \(eager\)"):
        cells(tmp_path, sweep={"grid": {key: values}})


# --- where ranks live -----------------------------------------------------------------------------------------------

LAYOUTS: list[tuple[dict[str, int], dict[str, int], int, int]] = [
    ({}, {}, 1, 1),  # Layout and resources -> dp and ranks per node.
    ({"dp": 4}, {}, 4, 4),
    ({"tp": 2}, {"nodes": 2, "gpus_per_node": 8}, 8, 8),
    ({"tp": 2, "pp": 4}, {"nodes": 2, "gpus_per_node": 8}, 2, 8),
    ({"tp": 2, "dp": 1}, {"gpus_per_node": 2}, 1, 2),
    ({"dp": 4}, {"nodes": 2}, 4, 2),
    ({"tp": 16}, {"gpus_per_node": 8}, 1, 8),  # This needs more ranks than there are. The rules report it.
]


@pytest.mark.parametrize(("layout", "resources", "dp", "ranks"), LAYOUTS)
def test_dp_follows_from_the_resources(
    tmp_path: Path, layout: dict[str, int], resources: dict[str, int], dp: int, ranks: int
) -> None:
    (cell,) = cells(tmp_path, parallelism=layout, resources=resources)
    assert cell.spec.parallelism.dp == dp
    assert cell.spec.placement.ranks_per_node == ranks


def test_the_device_is_the_hosts_unless_the_recipe_names_one(tmp_path: Path) -> None:
    assert [cell.spec.placement.device for cell in expand(read(tmp_path), "cuda")] == ["cuda"]
    named = read(tmp_path, resources={"device": "cpu"})
    assert [cell.spec.placement.device for cell in expand(named, "cuda")] == ["cpu"]


# --- picking --------------------------------------------------------------------------------------------------------

GRID = {
    "training.precision": ["fp32", "bf16"],
    "training.learning_rate": [1e-3, 2e-3],
    "cuda_graph": [{"impl": "torch_compile"}, {"impl": "transformer_engine", "scope": ["attn", "moe_router"]}],
}
PICKS: list[tuple[list[str], int, int]] = [
    ([], 8, 4),  # Selections -> numbers of graphed cells and eager baselines.
    (["training.precision=bf16"], 4, 2),
    (["training.learning_rate=1e-3"], 4, 2),
    (["training.learning_rate=0.0010"], 4, 2),
    (["training.precision=bf16", "training.learning_rate=0.002"], 2, 1),
    (["training.precision=bf16", "training.precision=fp32"], 8, 4),
    (["training.precision=bf16", "training.precision=fp32", "cuda_graph.impl=torch_compile"], 4, 4),
    (["cuda_graph.impl=torch_compile"], 4, 4),
    (["cuda_graph_impl=torch_compile"], 4, 4),
    (["cuda_graph.scope=[moe_router, attn]"], 4, 4),
    (["cuda_graph.scope=attn,moe_router"], 4, 4),
    (["cuda_graph_modules=attn,moe_router"], 4, 4),
    (["cuda_graph.scope=[]"], 4, 4),
    (["cuda_graph.impl=none"], 0, 4),
    (["model=tiny_moe"], 8, 4),
    (["model.moe_expert_capacity_factor=null"], 8, 4),
    (["training.deterministic=false"], 8, 4),
    (["engine=torch_native"], 8, 4),
    (["placement.device=cpu"], 8, 4),
]


@pytest.mark.parametrize(("selections", "graphed", "eager"), PICKS)
def test_cells_are_picked_with_their_twins(tmp_path: Path, selections: list[str], graphed: int, eager: int) -> None:
    picked = filter_cells(cells(tmp_path, sweep={"grid": GRID}), selections)
    assert sum(cell.spec.graphed for cell in picked) == graphed
    assert sum(not cell.spec.graphed for cell in picked) == eager


@pytest.mark.parametrize(
    ("selections", "message"),
    [
        (["training.seed=7", "training.seed=1234"], r"no selected cell has training.seed=7\n.*training.seed is 1234$"),
        (
            ["cuda_graph.impl=none", "cuda_graph.scope=[attn]", "cuda_graph.scope=[]"],
            r"no selected cell has .*\[attn\]\n.* is \[\], \[attn, moe_router\]$",
        ),
        (["training.seed=7", "cuda_graph.impl=none"], r"no cell has training.seed=7 and cuda_graph.impl=none\n"),
    ],
)
def test_each_selected_value_has_a_cell(tmp_path: Path, selections: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        filter_cells(cells(tmp_path, sweep={"grid": GRID}), selections)


def test_an_eager_cell_that_is_picked_is_asked_for(tmp_path: Path) -> None:
    """Otherwise planning would omit it, as a baseline that no cell needs."""
    picked = filter_cells(cells(tmp_path, sweep={"grid": GRID}), ["cuda_graph.impl=none"])
    assert not any(cell.is_added_baseline for cell in picked)
    assert any(
        cell.is_added_baseline
        for cell in filter_cells(cells(tmp_path, sweep={"grid": GRID}), ["cuda_graph.impl=torch_compile"])
    )


WRONG_PICKS = {
    "cuda_graph.impl": "not of the form key=value",
    "=3": "'' is not a field",
    "cuda_graph.imp=torch": "did you mean 'cuda_graph.impl'?",
    "training=3": "'training' is not a field",
    "repeats=3": "'repeats' is not a field",
    "run_id=3": "'run_id' is not a field",
    "__class__=3": "'__class__' is not a field",
    "model.__class__=3": "'model.__class__' is not a field",
    "cuda_graph.impl=torch_compil": "did you mean 'torch_compile'?",
    "training.steps=many": "--only: training.steps=many: not a whole number",
    "training.precision=": "training.precision=: not one of fp32, bf16",
    "cuda_graph.impl=local": r"no cell has cuda_graph.impl=local\n.*cuda_graph.impl is none, torch_compile, transformer",
    "training.seed=7": "training.seed is 1234",
}


@pytest.mark.parametrize("selection", WRONG_PICKS)
def test_a_wrong_selection_names_the_way_out(tmp_path: Path, selection: str) -> None:
    with pytest.raises(InputError, match=WRONG_PICKS[selection]) as caught:
        filter_cells(cells(tmp_path, sweep={"grid": GRID}), [selection])
    assert str(caught.value).startswith("--only")


def test_the_defaults_of_a_model_are_those_of_the_spec(tmp_path: Path) -> None:
    (cell,) = cells(tmp_path, model={"num_layers": 5})
    assert cell.spec.model == Model(num_layers=5)


def test_a_quick_sweep_has_short_runs_with_checks(tmp_path: Path) -> None:
    training = {"steps": 500, "learning_rate_warmup_steps": 100}
    graph = {"impl": "torch_compile"}
    (eager, graphed) = cells(tmp_path, training=training, cuda_graph=graph, equivalence={"mode": "quick"})
    assert eager.spec.training == graphed.spec.training and graphed.spec.training.steps == 20
    assert len(graphed.spec.checked_steps) == 5 and eager.spec.checked_steps == ()


@pytest.mark.parametrize(
    ("fields", "checks"),
    [
        ({}, 5),
        ({"step_checks": 0}, 0),
        ({"step_checks": 3, "training": {"deterministic": True}}, 3),
        ({"training": {"deterministic": True}}, 0),
        ({"cuda_graph": {"impl": "full_iteration", "optimizer": True}}, 5),
        ({"parallelism": {"tp": 2}}, 5),
        ({"parallelism": {"tp": 2}, "engine": "megatron"}, 5),
        ({"engine": "megatron"}, 5),
        ({"resources": {"device": "cpu"}}, 0),
    ],
)
def test_steps_are_checked_where_checks_are_proven_and_needed(
    tmp_path: Path, fields: dict[str, Any], checks: int
) -> None:
    defaults = {"cuda_graph": {"impl": "full_iteration"}, "resources": {"device": "cuda"}}
    (_, graphed) = cells(tmp_path, **defaults | fields)
    assert graphed.spec.step_checks == checks == len(graphed.spec.checked_steps)
