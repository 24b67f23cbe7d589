"""Test that a fix never leads to another rejection: apply every fix of every rejection in all shipped recipes, as a
user would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.contract.spec import Device, RunSpec, spec_to_json
from launch.support import SUPPORT
from orchestrator.plan.sound_fixes import alternatives, apply, keep_sound_fixes
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load
from orchestrator.rules import RULES, refusals

SHIPPED = Path(__file__).parents[4] / "recipes"
RECIPES = sorted([*SHIPPED.glob("*.yaml"), *SHIPPED.glob("exhibits/*.yaml")])
IN_WORDS: Mapping[str, Sequence[str]] = {
    "scope.moe_and_router": ["cuda_graph.scope=[attn, moe]"],
    "layout.interleaved_microbatches": ["training.global_batch_size=8"],
}
"""Settings for fixes that are given only in words."""
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
        name: content["cuda_graph"][name] for name in ("impl", "scope", "warmup_steps", "optimizer")
    }
    resources = {
        "nodes": placement["nodes"],
        "gpus_per_node": placement["ranks_per_node"],
        "device": placement["device"],
    }
    content["model"].pop("preset")
    path.write_text(yaml.safe_dump({"name": "fixed", "repeats": 2, "resources": resources, **content}))


def fixes(spec: RunSpec) -> Iterator[tuple[str, list[str]]]:
    """Yield the rule and the settings of each alternative of each fix that the plan prints."""
    for reason in keep_sound_fixes(spec, refusals(spec)):
        spelled = [settings for _, settings in alternatives(reason.remedy) if settings]
        spelled += [[*IN_WORDS[reason.rule]]] if reason.rule in IN_WORDS else []
        assert spelled, f"{reason.rule} spells no setting: {reason.remedy}"
        yield from ((reason.rule, settings) for settings in spelled)


def test_the_shipped_recipes_have_refusals() -> None:
    assert {path.name for path in RECIPES if refused_cells(path)} >= REFUSED_FOR_SHOW


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_fix_of_a_shipped_recipe_is_accepted(path: Path, tmp_path: Path) -> None:
    for spec in refused_cells(path):
        as_recipe(spec, tmp_path / "cell.yaml")
        rules = {reason.rule for reason in refusals(spec)}
        for rule, settings in fixes(spec):
            overrides = [setting.replace(" ", "") for setting in settings]
            cells = expand(load(tmp_path / "cell.yaml", overrides), spec.placement.device)
            (fixed,) = (cell.spec for cell in cells if not cell.is_added_baseline)
            assert {reason.rule for reason in refusals(fixed)} <= rules - {rule}, (spec, rule, settings)


def test_an_engine_that_runs_the_cell_is_named() -> None:
    """TECudaGraphHelper captures a YaRN model's attention wrongly; torch_native runs the same cell."""
    (remedy,) = {
        reason.remedy
        for spec in refused_cells(SHIPPED / "gpt_oss_120b.yaml", "step_checks=0")
        for reason in keep_sound_fixes(spec, refusals(spec))
        if reason.rule == "megatron.yarn_positions"
    }
    assert remedy == (
        "Set cuda_graph.scope=[moe_router, moe_preprocess], or engine=torch_native, or cuda_graph.mend=[yarn_positions], or "
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
