"""Test commands to paste."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launch.contract.outcomes import Outcome, OutcomeName
from launch.contract.paths import SweepPaths
from launch.contract.plan import Margins, Plan
from orchestrator.output.next_commands import format_command, suggest_after
from orchestrator.sweeps.run_state import RunState


def test_a_command_starts_this_interpreter_and_names_another_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ORCHESTRATOR_STORE", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    sweep = SweepPaths(Path("sweeps") / "mine")
    assert format_command("wrap", sweep) == "venv/python -m orchestrator wrap"
    assert (
        format_command("wrap", SweepPaths(Path("other") / "mine")) == "venv/python -m orchestrator wrap --store other"
    )


@pytest.mark.parametrize(
    ("ended", "options"),
    [
        (["COMPLETED"], []),
        (["CONFIG"], []),
        (["CONFIG", "CONFIG", "HANG"], [" --failed"]),
        (["ENVIRONMENT"], [" --failed"]),
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
            str(number),
            name,
            2,
            outcome=Outcome(name, "init", "", 1.0, 2.0, repeats_alike=True),
            expected=name == "COMPLETED",
        )
        for number, name in enumerate(ended)
    }
    plan = Plan("x", "", "x.yaml", Margins(), (), ())
    commands = suggest_after(SweepPaths(tmp_path / "x"), plan, states)
    resumed = [command.partition(" resume x")[2] for command in commands if " resume x" in command]
    assert resumed == [f"{option} --store {tmp_path}" for option in options]


def test_a_sweep_that_runs_nothing_names_the_report_which_says_why(tmp_path: Path) -> None:
    plan = Plan("x", "", "x.yaml", Margins(), (), ())
    (command,) = suggest_after(SweepPaths(tmp_path / "x"), plan, {})
    assert command.endswith(f" report x --store {tmp_path}")
    assert not suggest_after(SweepPaths(tmp_path / "x"), plan, {}, reported=True)
