"""Test that a fix never leads to another rejection or known fault: apply every fix that a plan or advice prints for all
shipped recipes, as a user would."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.contract.plan import Reason
from launch.contract.spec import Command, CudaGraph, Device, Placement, RunSpec, spec_to_json
from launch.support import SUPPORT, known_faults
from orchestrator.advise.eager_sweep import inspected_eager_cells, list_candidates
from orchestrator.plan.memory_check import MemoryCheck
from orchestrator.plan.planner import make_plan
from orchestrator.plan.sound_fixes import ALONE, alternatives, apply, keep_sound_fixes, refused_settings
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load
from orchestrator.rules import RULES, refusals
from orchestrator.targets.host import Host

SHIPPED = Path(__file__).parents[4] / "recipes"
RECIPES = sorted([*SHIPPED.glob("*.yaml"), *SHIPPED.glob("exhibits/*.yaml")])
REFUSED_FOR_SHOW = {
    "gpt_oss_20b.yaml", "packed_sequences.yaml", "qwen3_8l_megatron.yaml", "tiny_moe.yaml",
}  # fmt: skip
"""These recipes must have rejected cells. Others may have some too."""


@cache  # Not when this module is imported, which every process of pytest-xdist does.
def refused_cells(path: Path, *overrides: str) -> list[RunSpec]:
    """Return the rejected cells of a shipped recipe, on either device."""
    devices: tuple[Device, ...] = ("cuda", "cpu")
    recipe = load(path, overrides)
    specs = {cell.spec.cell_id: cell.spec for device in devices for cell in expand(recipe, device)}
    # The recipe of a program has other sections than as_recipe writes.
    return [spec for spec in specs.values() if spec.engine != "command" and refusals(spec)]


def as_recipe(spec: RunSpec, path: Path) -> None:
    """Write ``spec`` as the recipe of one cell."""
    content: dict[str, Any] = spec_to_json(spec)
    placement = content.pop("placement")
    for own in ("repeat", "perturbed", "inspect", "layer_check_steps", "command"):
        content.pop(own, None)
    content = {name: value for name, value in content.items() if value != {}}
    del content["parallelism"]["dp"]  # dp follows from the resources.
    content["cuda_graph"] = {
        name: content["cuda_graph"][name] for name in ("impl", "scope", "warmup_steps", "optimizer", "mend")
    }
    resources = {
        "nodes": placement["nodes"],
        "gpus_per_node": placement["ranks_per_node"],
        "device": placement["device"],
    }
    content["model"].pop("preset")
    path.write_text(yaml.safe_dump({"name": "fixed", "repeats": 2, "resources": resources, **content}))


def test_the_shipped_recipes_have_refusals() -> None:
    assert {path.name for path in RECIPES if refused_cells(path)} >= REFUSED_FOR_SHOW


RELEASES = frozenset({"megatron-core 0.16", "megatron-core 0.19", "transformer-engine"})
HOSTS = (
    Host(tuple("01234567"), RELEASES, has_compiler=True, gpu_memory_gib=141.0),
    Host(tuple("01"), RELEASES - {"megatron-core 0.19"}, has_compiler=True, gpu_memory_gib=20.0),
    Host((), RELEASES - {"megatron-core 0.16"}, has_compiler=False),
)
"""Hosts that lack memory, GPUs, one of the releases or a compiler."""


def cells_with_fixes(path: Path) -> list[tuple[RunSpec, Reason]]:
    """Return what the plan of a shipped recipe prints fixes with settings for."""
    recipe = load(path)
    plans = (make_plan(recipe, expand(recipe, host.device), host, MemoryCheck(host)) for host in HOSTS)
    cells = (cell for plan in plans for cell in plan.cells)
    printed = {(c.cell_id, reason): c.run_spec for c in cells for reason in (*c.reasons, *c.known_faults)}
    # The recipe of a program has other sections than as_recipe writes.
    return [(spec, said) for (_, said), spec in printed.items() if spec.engine != "command" and "=" in said.remedy]


def worse(before: RunSpec, after: RunSpec, rule: str) -> list[str]:
    """Return what is wrong with a cell after a fix of ``rule``."""
    refused, left = ({reason.rule for reason in refusals(spec)} for spec in (before, after))
    known, kept = ({reason.rule for reason in known_faults(spec)} for spec in (before, after))
    graph = after.cuda_graph
    return [
        *(left - refused),
        *(kept - known),
        *({rule} & (left if rule in refused else kept)),
        *(["captures nothing"] if graph.implementation.takes_scope and not after.captured_parts else []),
        *(["no change"] if before == after else []),
    ]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_fix_in_the_plan_of_a_shipped_recipe_helps(path: Path, tmp_path: Path) -> None:
    for spec, reason in cells_with_fixes(path):
        as_recipe(spec, tmp_path / "cell.yaml")
        assert ALONE not in reason.remedy
        for settings in (settings for _, settings in alternatives(reason.remedy) if settings):
            overrides = [setting.replace(" ", "") for setting in settings]
            cells = expand(load(tmp_path / "cell.yaml", overrides), spec.placement.device)
            (fixed,) = (cell.spec for cell in cells if not cell.is_added_baseline)
            assert worse(spec, fixed, reason.rule) == [], (spec, reason, settings)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_fix_in_the_advice_on_a_shipped_recipe_helps(path: Path) -> None:
    cells = expand(load(path), "cuda")
    for eager in (cell.spec for cell in inspected_eager_cells(cells) if cell.spec.engine != "command"):
        for graph, reasons in list_candidates(eager).items():
            spec = replace(eager, cuda_graph=graph)
            for reason in (reason for reason in reasons if ALONE not in reason.remedy):
                for settings in (settings for _, settings in alternatives(reason.remedy) if settings):
                    assert worse(spec, apply(spec, settings), reason.rule) == [], (spec, reason, settings)


def test_the_known_fault_of_a_model_without_dense_layers_gets_fixes_that_capture_something() -> None:
    """A dropless model can be captured neither whole nor by the scope mlp."""
    host, recipe = HOSTS[0], load(SHIPPED / "gpt_oss_5l_megatron.yaml")
    plan = make_plan(recipe, expand(recipe, host.device), host)
    (fault,) = (fault for cell in plan.cells for fault in cell.known_faults)
    assert fault.remedy == (
        "Set cuda_graph.mend=[yarn_positions], or cuda_graph.scope=[moe_router, moe_preprocess], or engine=torch_native."
    )


def test_a_users_program_is_told_nothing_that_only_this_project_has() -> None:
    command = Command("megatron_lm", "pretrain_gpt.py --bf16 --position-embedding-type yarn")
    graph = CudaGraph("transformer_engine", ("attn",))
    spec = RunSpec("command", command=command, cuda_graph=graph, placement=Placement("cuda"))
    remedies = [reason.remedy for reason in keep_sound_fixes(spec, known_faults(spec))]
    assert any("cuda_graph.impl=full_iteration" in remedy for remedy in remedies)
    assert not [remedy for remedy in remedies if "engine=" in remedy or "mend" in remedy]


def test_names_of_a_site_are_not_settings() -> None:
    reason = Reason(
        "cluster.nodes", "no node", "change constraint in the profile; features of this partition: disk=nvme, a100"
    )
    assert keep_sound_fixes(RunSpec(), (reason,)) == (reason,)


SIZES = {"cuda_graph.mend": 0, "model": 2, "data": 2, "engine": 3}
"""How much a setting changes: a repair, the configuration (1, the others), the task, the engine."""


def test_the_smallest_change_comes_first() -> None:
    for rule in (*RULES, *(rule for rules in SUPPORT.values() for rule in rules)):
        sentence, _, _ = rule.fix.partition(". Or ")
        names = [
            [setting.partition("=")[0] for setting in settings] for _, settings in alternatives(sentence) if settings
        ]
        sizes = [max(SIZES.get(name, SIZES.get(name.partition(".")[0], 1)) for name in each) for each in names]
        assert sizes == sorted(sizes), rule.fix


def test_an_engine_that_runs_the_cell_is_named() -> None:
    """TECudaGraphHelper captures a YaRN model's attention wrongly; torch_native runs the same cell."""
    (remedy,) = {
        reason.remedy
        for spec in refused_cells(SHIPPED / "gpt_oss_120b.yaml", "step_checks=0")
        for reason in keep_sound_fixes(spec, refusals(spec))
        if reason.rule == "megatron.yarn_positions"
    }
    assert remedy == (
        "Set cuda_graph.mend=[yarn_positions], or cuda_graph.scope=[moe_router, moe_preprocess], or engine=torch_native, or "
        "step_checks=5: the verdict then shows the fault."
    )


def test_settings_in_fixes_are_those_of_a_cell() -> None:
    """A field with a typing error raises InputError."""
    for rule in (*RULES, *(rule for rules in SUPPORT.values() for rule in rules)):
        for _, settings in alternatives(rule.fix):
            apply(RunSpec(), settings)


def test_a_fix_that_adds_to_another_fix_is_left_out() -> None:
    (spec,) = (
        spec
        for spec in refused_cells(SHIPPED / "gpt_oss_5l_megatron.yaml")
        if spec.cuda_graph.impl == "full_iteration" and spec.placement.device == "cuda"
    )
    (remedy,) = (reason.remedy for reason in keep_sound_fixes(spec, refusals(spec)))
    assert remedy.endswith(", or engine=torch_native."), "not also with another dispatcher"


def test_verdicts_advise_no_setting_that_rules_refuse() -> None:
    found = {
        name: {
            refused_settings(cell.spec)
            for cell in expand(load(SHIPPED / f"{name}.yaml", []), "cuda")
            if cell.spec.graphed
        }
        for name in ("gpt_oss_5l_megatron", "launch_bound", "user_script")
    }
    assert all("training.deterministic=true" in refused for refused in found["gpt_oss_5l_megatron"])
    assert found["launch_bound"] == {()} and found["user_script"] == {("step_checks=5",)}
