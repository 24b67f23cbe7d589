"""Commands to paste."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launch.contract.paths import SweepPaths
from launch.contract.plan import Margins, Plan
from orchestrator.output.next_commands import sweep_command


def test_more_repeats_keep_the_overrides_filters_cluster_and_store(tmp_path: Path) -> None:
    plan = Plan("x", "", "x.yaml", Margins(), (), (), overrides=("name=x", "repeats=2", "training.steps=50"))
    paths = SweepPaths(tmp_path / "x")
    assert sweep_command(paths, plan, 7).partition(" sweep ")[2] == (
        f"x.yaml name=x training.steps=50 repeats=7 --store {tmp_path}"
    )
    elsewhere = replace(plan, only=("cuda_graph.impl=torch",), cluster="big")
    assert " --only cuda_graph.impl=torch --cluster big --store " in sweep_command(paths, elsewhere, 7)
