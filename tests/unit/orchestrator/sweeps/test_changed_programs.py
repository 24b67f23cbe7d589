"""Test which files of a user's program count as changed since the runs on disk."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from launch.contract.plan import read_plan
from launch.contract.spec import Command, RunSpec
from orchestrator.sweeps.changed_programs import edited_files
from tests import records


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let written sweeps run a program that reads settings in JSON, and whose graphs have settings of their own."""
    of_engine = records.workload_spec

    def of_program(*arguments: Any) -> RunSpec:
        spec = of_engine(*arguments)
        command = Command(run="python train.py --config=settings.json", workdir=str(tmp_path))
        graph = dataclasses.replace(spec.cuda_graph, arguments=("graphs.json",) if spec.graphed else ())
        return dataclasses.replace(spec, engine="command", command=command, cuda_graph=graph)

    monkeypatch.setattr(records, "workload_spec", of_program)
    for name in ("train.py", "settings.json", "graphs.json"):
        (tmp_path / name).write_text("{}")


def still_runs(run: records.AttemptRecord) -> None:
    if run.spec.graphed:
        run.outcome = None


@pytest.mark.parametrize(
    ("edited", "edit", "found"),
    [
        (["settings.json"], records.unchanged, ["settings.json"]),
        (["graphs.json", "train.py"], records.unchanged, ["graphs.json"]),  # The digest of the code covers the script.
        ([], records.unchanged, []),
        (["graphs.json"], still_runs, []),  # A run may have written it.
        (["settings.json"], records.unbegun, []),
    ],
)
def test_settings_that_are_edited_after_the_last_run_are_found(
    tmp_path: Path, edited: list[str], edit: records.Edit, found: list[str]
) -> None:
    sweep = records.write_sweep(tmp_path / "mine", edit=edit, steps=20)
    for name in ("train.py", "settings.json", "graphs.json"):
        moved = records.STARTED + (1e6 if name in edited else 60)
        os.utime(tmp_path / name, (moved, moved))
    assert edited_files(sweep, read_plan(sweep)) == [str(tmp_path / name) for name in found]
