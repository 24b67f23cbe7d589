"""Test how many files commands open for each run of a sweep. This number bounds their time, and does not depend on the
load."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.report import __main__ as report_process
from analysis.report import selection
from launch.contract.plan import read_plan
from launch.supervise.pack_attempt import pack_if_completed
from orchestrator.cli.main import main
from tests.records import write_sweep

COMMANDS: dict[str, Callable[[Path], int]] = {
    "status": lambda sweep: main(["status", sweep.name, "--store", str(sweep.parent)]),
    "prune": lambda sweep: main(["prune", sweep.name, "--keep", "reports", "--dry-run", "--store", str(sweep.parent)]),
    "report": lambda sweep: report_process.main([str(sweep)]),
}


@pytest.mark.parametrize(("command", "files_a_run"), [("status", 2.25), ("prune", 1), ("report", 14.25)])
def test_the_files_that_a_command_opens_grow_with_the_runs_alone(
    command: str, files_a_run: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A report reads the files of drawn workloads twice.
    monkeypatch.setattr(selection, "MAXIMUM_WORKLOADS", 1)
    few, many = (_opened(command, tmp_path / f"sweep{n}", n, monkeypatch) for n in (2, 4))
    assert many - few == 8 * files_a_run, (few, many)


def _opened(command: str, root: Path, workloads: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many files and folders ``command`` opens or tries to open, for a sweep with four runs per workload."""
    sweep = write_sweep(root, workloads=workloads, steps=20)
    for run_id in read_plan(sweep).cell_of_run():
        pack_if_completed(sweep.run(run_id).attempt(1), ranks=1)
    opened: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            opened.extend([str(path)] if str(path).startswith(str(root)) else [])
            return function(path, *arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((os, "open"), (os, "listdir"), (builtins, "open")):
            patch.setattr(module, name, counted(getattr(module, name)))
        assert COMMANDS[command](root) in (0, 4)
    return len(opened)
