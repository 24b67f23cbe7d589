"""Test the runs of advise, and that it recommends only graph configurations that a sweep would accept."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from analysis.records.load import Records
from launch.contract.plan import Plan
from launch.contract.spec import Command, CudaGraph, FrameworkName, Model, Parallelism, Placement, RunSpec, Training
from orchestrator.advise.advice import advise
from orchestrator.advise.eager_sweep import (
    MEASURED_STEPS,
    advice_recipe,
    inspected_eager_cells,
    list_candidates,
    own_graphs,
)
from orchestrator.advise.render import render
from orchestrator.plan.planner import make_plan
from orchestrator.recipe.expand import expand, filter_cells
from orchestrator.recipe.recipe import load
from orchestrator.rules import violations
from orchestrator.targets.host import Host

RECIPES = Path(__file__).parents[4] / "recipes"
GPUS = Host(tuple(map(str, range(8))), frozenset({"megatron-core", "transformer-engine"}), True)
MOE = Model(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=64)
PLAIN = ("training.compile=none",)
BATCH = Training(precision="bf16", global_batch_size=8)


def plan_of(name: str, *overrides: str, only: tuple[str, ...] = ()) -> Plan:
    recipe = load(RECIPES / f"{name}.yaml", overrides)
    cells = filter_cells(expand(recipe, GPUS.device), only)
    return make_plan(advice_recipe(recipe), inspected_eager_cells(cells), GPUS)


def works(spec: RunSpec) -> set[str]:
    return {graph.label for graph, reasons in list_candidates(spec).items() if not reasons}


# --- what is run ----------------------------------------------------------------------------------------------------


def test_eager_cells_are_run_once_shortened_and_inspected() -> None:
    plan = plan_of("qwen3_8l")
    assert plan.name == "qwen3_8l-advice" and plan.tracking is None
    assert [cell.label for cell in plan.cells] == ["eager, compile=none", "eager, compile=elementwise"]
    for cell in plan.cells:
        assert cell.state == "run" and len(cell.run_ids) == 1
        assert cell.run_spec.inspect and not cell.run_spec.graphed
        assert cell.run_spec.training.steps == 3 + 1 + 2 + MEASURED_STEPS
    assert len(plan.bundles) == 2


def test_a_shorter_recipe_and_its_warm_up_stay_legal() -> None:
    for steps, expected in ((10, 10), (5000, 6 + MEASURED_STEPS)):
        plan = plan_of(
            "launch_bound", f"training.steps={steps}", f"training.learning_rate_warmup_steps={steps}", only=PLAIN
        )
        (cell,) = plan.cells
        assert cell.state == "run", cell.reasons
        assert cell.run_spec.training.steps == cell.run_spec.training.learning_rate_warmup_steps == expected


def test_workloads_that_differ_only_in_steps_are_one() -> None:
    assert len(plan_of("launch_bound", "sweep.grid.training.steps=[100,200]", only=PLAIN).cells) == 1


def test_cells_are_filtered_as_in_a_sweep() -> None:
    plan = plan_of("qwen3_8l", only=("training.compile=none", "cuda_graph.impl=torch"))
    assert [cell.label for cell in plan.cells] == ["eager, compile=none"]


def test_an_eager_cell_stays_where_none_of_its_graphs_can_work() -> None:
    plan = plan_of("tiny_moe", "sweep=null", "cuda_graph.impl=full_iteration", "training.precision=fp32")
    assert [cell.state for cell in plan.cells] == ["run"]


# --- what is put forward --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (RunSpec(training=BATCH), {"torch", "torch.attn", "torch.mlp", "torch.attn.mlp"}),
        (RunSpec(training=BATCH, model=MOE, parallelism=Parallelism(ep=2, dp=2)), {
            "torch.attn", "torch.moe_router", "torch.attn.moe_router", "torch.moe_router.moe_preprocess",
            "torch.attn.moe_router.moe_preprocess",
        }),
        (RunSpec(training=BATCH, model=MOE, parallelism=Parallelism(ep=2, dp=2, dispatcher="allgather")), {
            "torch", "torch.attn", "torch.moe", "torch.attn.moe", "torch.moe_router", "torch.attn.moe_router",
            "torch.moe_router.moe_preprocess", "torch.attn.moe_router.moe_preprocess", "full_iteration",
            "full_iteration.optimizer",
        }),
    ],
    ids=["dense", "alltoall", "allgather"],
)  # fmt: skip
def test_the_configurations_that_work_are_those_the_rules_accept(spec: RunSpec, expected: set[str]) -> None:
    spec = replace(spec, placement=Placement(device="cuda", ranks_per_node=spec.parallelism.world_size))
    found = works(spec)
    assert {label for label in found if label.startswith(("torch.", "full")) or label == "torch"} - expected <= {
        "full_iteration", "full_iteration.optimizer"
    }  # fmt: skip
    assert expected <= found
    assert {label.replace("torch", "transformer_engine", 1) for label in expected if label.startswith("torch")} <= found
    assert ("full_iteration" in found) == (spec.parallelism.dispatcher == "allgather" or not spec.model.is_moe)
    assert ("torch_compile" in found) == (spec.parallelism.ep == 1)


def test_the_dispatcher_that_waits_is_the_reason_given() -> None:
    spec = RunSpec(
        training=BATCH, model=MOE, parallelism=Parallelism(ep=2, dp=2), placement=Placement("cuda", ranks_per_node=2)
    )
    reasons = {graph.label: [one.rule for one in reasons] for graph, reasons in list_candidates(spec).items()}
    assert reasons["full_iteration"] == reasons["torch"] == ["capture.native_expert_sync"]


def test_configurations_that_mean_nothing_for_a_model_are_omitted() -> None:
    labels = {graph.label for graph in list_candidates(RunSpec(placement=Placement("cuda")))}
    assert not [label for label in labels if "moe" in label or "mamba" in label or "local" in label]


def test_reasons_against_the_eager_run_do_not_reject_graphs() -> None:
    spec = RunSpec(training=BATCH, placement=Placement("cuda"))
    assert {"torch", "full_iteration", "torch.attn"} <= works(spec)
    narrow = replace(spec, training=replace(BATCH, steps=1))
    assert violations(narrow) and works(narrow) == works(spec)


def test_known_wrong_results_are_not_advised() -> None:
    """launch.support accepts it in deterministic mode, so that the verdict shows the fault."""
    training = replace(BATCH, deterministic=True)
    spec = RunSpec(engine="megatron", training=training, placement=Placement("cuda"))
    reasons = {graph.label: [one.rule for one in reasons] for graph, reasons in list_candidates(spec).items()}
    assert reasons["local"] == ["megatron.local_inputs"] and "full_iteration" in works(spec)


DENSE_FLAGS = "pretrain_gpt.py --num-layers 4 --bf16 --no-gradient-accumulation-fusion"
MOE_FLAGS = f"{DENSE_FLAGS} --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"


@pytest.mark.parametrize(
    ("framework", "run", "expected"),
    [
        ("script", "train.py", set()),
        ("huggingface", "train.py", {"torch_compile"}),
        ("torchtitan", "train.py", {"full_iteration"}),
        ("megatron_lm", DENSE_FLAGS, {
            "transformer_engine", "transformer_engine.attn", "transformer_engine.mlp", "transformer_engine.attn.mlp", "local",
            "local.attn", "local.attn.mlp", "full_iteration",
        }),
        ("megatron_lm", MOE_FLAGS, {
            "transformer_engine.attn", "transformer_engine.moe_router", "transformer_engine.attn.moe_router",
            "transformer_engine.moe_router.moe_preprocess", "transformer_engine.attn.moe_router.moe_preprocess",
        }),
    ],
    ids=["script", "huggingface", "torchtitan", "dense", "moe"],
)  # fmt: skip
def test_a_users_program_gets_what_its_framework_can_turn_on(
    framework: FrameworkName, run: str, expected: set[str]
) -> None:
    """The words of the command decide whether the model has experts, and which captures Megatron refuses."""
    command = Command(framework, run)
    spec = RunSpec(engine="command", megatron_core="0.19", command=command, placement=Placement("cuda"))
    assert works(spec) == expected
    rules = {one.rule for reasons in list_candidates(spec).values() for one in reasons}
    assert ("capture.megatron_expert_sync" in rules) == (run == MOE_FLAGS)
    assert ("command.framework" in rules) == (framework != "megatron_lm"), "only then there is no Megatron to ask"


def test_graphs_that_a_recipe_names_are_the_only_ones() -> None:
    cells = expand(load(RECIPES / "user_script.yaml"), GPUS.device)
    graphs = own_graphs(cells)
    (eager,) = inspected_eager_cells(cells)
    assert list_candidates(eager.spec, graphs) == {CudaGraph("command", name="by_hand", arguments=("--graph",)): ()}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_block_can_be_pasted_and_swept(path: Path, tmp_path: Path) -> None:
    """The block replaces the recipe's own sweep. Each point becomes a cell, and none is rejected unless its eager
    baseline is."""
    content = yaml.safe_load(path.read_text())
    if (
        path.stem == "tiny_parallel"
    ):  # The sweep is bitwise and on a CPU, which has only torch_compile. It needs a compiled baseline.
        content["training"]["compile"] = "whole"
    pasted = tmp_path / path.name
    pasted.write_text(yaml.safe_dump(content))
    recipe = load(pasted, ["sweep=null"])
    resolved = expand(recipe, GPUS.device)
    plan = make_plan(advice_recipe(recipe), inspected_eager_cells(resolved), GPUS)
    candidates = {cell.cell_id: list_candidates(cell.run_spec, own_graphs(resolved)) for cell in plan.cells}
    (advice,) = advise(Records(plan, {}), candidates)
    block = re.search(r"```yaml\n(.*?)```", render(plan, [advice]), re.DOTALL)
    assert block is not None
    content.pop("sweep", None)
    printed = yaml.safe_load(block[1])
    graphs = printed.pop("command", {})
    command = {"command": {**content["command"], **graphs}} if graphs else {}
    pasted.write_text(yaml.safe_dump({**content, **printed, **command}))
    cells = expand(load(pasted), GPUS.device)
    assert [cell.spec.cuda_graph for cell in cells if cell.spec.graphed] == list(advice.points)
    assert {violations(cell.spec) for cell in cells} == {violations(cells[0].spec)}
