"""Test the runs that only a verdict needs: they begin after all others have ended, whatever command was killed in
between."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.common.atomic_files import write_json
from launch.contract.bundle import BundleOrder
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from launch.contract.spec import spec_from_json
from orchestrator.cli.main import main
from orchestrator.submit.slurm_queue import Submitted
from orchestrator.sweeps.store import write_orders, write_plan
from orchestrator.workflow import run_sweep
from tests.planned import CLUSTER, COMPILED, plan
from tests.records import attempt_record, write_attempt


def end_runs(sweep: SweepPaths, found: Plan, run_ids: Sequence[str]) -> None:
    cells = found.cell_of_run()
    for run_id in run_ids:
        spec = spec_from_json(cells[run_id].spec_of(cells[run_id].run_ids.index(run_id)))
        write_attempt(sweep, attempt_record(spec))


def test_a_needed_run_is_a_job_of_its_own_after_all_others_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(tmp_path, host=CLUSTER, sweep={"grid": COMPILED})
    sweep, runs = SweepPaths(tmp_path / found.name), found.bundles[0].run_ids
    (needed,) = found.runs_if_needed
    submitted: list[tuple[tuple[str, int], ...]] = []

    def enqueue(paths: SweepPaths, planned: Plan, orders: Sequence[BundleOrder], *rest: Any) -> Submitted:
        """Write orders, and be killed before sbatch."""
        submitted.extend(order.schedule for order in orders)
        write_orders(paths, orders)
        return Submitted()

    def report(paths: SweepPaths) -> None:
        write_json(paths.report / "summary.json", {"needed_runs": [needed]})

    monkeypatch.setattr(run_sweep, "enqueue", enqueue)
    monkeypatch.setattr(run_sweep, "write_report", report)

    def carry_out() -> list[str]:
        submitted.clear()
        states = run_sweep.carry_out(sweep, found, CLUSTER, "new", "slurm", wait=False)
        assert list(states)[:4] == list(runs)
        return [run_id for schedule in submitted for run_id, _ in schedule]

    write_plan(sweep, found)
    end_runs(sweep, found, runs[:3])
    assert carry_out() == list(runs[2:]), "the others first, each beside its partner"
    report(sweep)
    assert main(["status", found.name, "--store", str(tmp_path)]) == 0
    assert f"{needed} has not run yet" in capsys.readouterr().out
    assert main(["status", found.name, "--json", "--store", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["needed_runs"] == [needed]
    end_runs(sweep, found, runs[3:])
    assert carry_out() == [needed]
    assert carry_out() == [needed], "the first command was killed before sbatch"
    end_runs(sweep, found, [needed])
    assert carry_out() == []
    capsys.readouterr()
    assert main(["status", found.name, "--store", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "has not run yet" not in out and "5 COMPLETED" in out
