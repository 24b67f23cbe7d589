"""Test commands to paste."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch.common.command_line import Parser
from launch.contract.outcomes import Outcome, OutcomeName
from launch.contract.paths import SweepPaths
from launch.contract.plan import Margins, Plan
from orchestrator.cli.verbs import wrap
from orchestrator.output.next_commands import format_command, repeat_command, suggest_after
from orchestrator.plan.planner import make_plan
from orchestrator.recipe.expand import expand
from orchestrator.recipe.recipe import load
from orchestrator.recipe.wrapped_commands import RECIPE_FILE, WrappedCommands
from orchestrator.sweeps.run_state import RunState
from orchestrator.targets.host import Host


def test_more_repeats_keep_the_overrides_filters_cluster_and_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan("x", "", "x.yaml", Margins(), (), (), overrides=("name=x", "repeats=2", "training.steps=50"))
    paths = SweepPaths(tmp_path / "x")
    assert " sweep FOLDER/x.yaml name=x " in repeat_command(paths, plan, 7)
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").touch()
    assert repeat_command(paths, plan, 7).partition(" sweep ")[2] == (
        f"x.yaml name=x training.steps=50 repeats=7 --store {tmp_path}"
    )
    elsewhere = replace(plan, only=("cuda_graph.impl=torch",), cluster="big")
    assert " --only cuda_graph.impl=torch --cluster big --store " in repeat_command(paths, elsewhere, 7)


def test_more_repeats_of_a_recipe_that_has_the_name_of_a_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped recipe would train another model."""
    monkeypatch.chdir(tmp_path)
    plan = Plan("x", load(Path("tiny_moe"), ["name=x"]).text, "tiny_moe.yaml", Margins(), (), (), overrides=("name=x",))
    paths = SweepPaths(tmp_path / "sweeps" / "x")
    assert " sweep tiny_moe.yaml name=x repeats=4 " in repeat_command(paths, plan, 4)
    edited = replace(plan, recipe=plan.recipe.replace("tiny_moe", "tiny_dense"))
    assert " sweep FOLDER/tiny_moe.yaml name=x repeats=4 " in repeat_command(paths, edited, 4)


def test_a_command_for_another_folder_names_store_and_python_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ORCHESTRATOR_STORE", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    sweep = SweepPaths(Path("sweeps") / "mine")
    assert format_command("wrap", sweep) == "venv/python -m orchestrator wrap"
    there = format_command("wrap", sweep, elsewhere=True)
    assert there == f"{tmp_path}/venv/python -m orchestrator wrap --store {tmp_path}/sweeps"


@pytest.mark.parametrize("margins", [Margins(), Margins(loss=0.5, grad_norm=0.1, allow_differences=("lr", "packages"))])
def test_wrapped_commands_are_wrapped_again(tmp_path: Path, margins: Margins) -> None:
    commands = WrappedCommands(
        "X=1 sh t --x 'a b'", "X=1 sh t --x 'a b' --graphs", str(tmp_path), "", 120, 2, 3, margins
    )
    path = tmp_path / RECIPE_FILE
    path.write_text(commands.recipe)
    recipe = load(path)
    plan = make_plan(recipe, expand(recipe, "cpu"), Host((), frozenset(), True))
    there, _, words = repeat_command(SweepPaths(tmp_path / "x"), plan, 7).partition(" wrap ")
    assert there.startswith(f"cd {tmp_path} && ")
    parser = Parser()
    wrap.add_arguments(parser)
    again, _ = parser.parse_known_args(shlex.split(words))
    assert (again.steps, again.ranks, again.repeats) == (120, 3, 7)
    sides = again.eager[0], again.graphed[0]
    assert WrappedCommands(*sides, str(tmp_path), "", 120, 2, 3, wrap._margins(again)).recipe == commands.recipe


@pytest.mark.parametrize(
    ("ended", "options"),
    [
        (["COMPLETED"], []),
        (["CANCELLED", "COMPLETED"], [""]),
        (["NODE_FAIL"], [""]),
        (["HANG"], [" --failed"]),
        (["CANCELLED", "HANG"], ["", " --failed"]),
    ],
)
def test_only_runs_that_failed_by_themselves_need_a_resume_with_failed(
    tmp_path: Path, ended: list[OutcomeName], options: list[str]
) -> None:
    states = {
        str(number): RunState(
            str(number), name, 2, outcome=Outcome(name, "init", "", 1.0, 2.0), expected=name == "COMPLETED"
        )
        for number, name in enumerate(ended)
    }
    plan = Plan("x", "", "x.yaml", Margins(), (), ())
    commands = suggest_after(SweepPaths(tmp_path / "x"), plan, states)
    resumed = [command.partition(" resume x")[2] for command in commands if " resume x" in command]
    assert resumed == [f"{option} --store {tmp_path}" for option in options]
