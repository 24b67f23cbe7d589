"""Test the order in which the queue of a host starts bundles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launch.contract.paths import SweepPaths
from orchestrator.submit.attempts_to_begin import attempts_to_begin
from orchestrator.submit.local_queue import Queue
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.store import write_orders, write_plan
from tests.planned import CPU_HOST, plan


def test_bundles_start_in_the_plans_order_whatever_their_ids(tmp_path: Path) -> None:
    found = plan(tmp_path, sweep={"grid": {"training.seed": [1, 2, 3, 4]}})
    backwards = sorted(found.bundles, key=lambda bundle: bundle.bundle_id, reverse=True)
    found, paths = replace(found, bundles=tuple(backwards)), SweepPaths(tmp_path / "x")
    write_plan(paths, found)
    states = {run_id: RunState(run_id, "PLANNED", 0) for bundle in backwards for run_id in bundle.run_ids}
    write_orders(paths, attempts_to_begin(found, states, CPU_HOST, "new"))
    (_, ready) = Queue(paths).look()
    assert [bundle.name for bundle in ready] == [bundle.bundle_id for bundle in backwards]
