"""Test layouts over nodes: the shipped recipe trains the same model on two and on four nodes with two tasks each."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from launch.common.atomic_files import read_json_lines
from launch.contract.plan import read_plan
from tests.integration.host import ROOT
from tests.records import read_metrics
from tests.slurm.site import Site

pytestmark = pytest.mark.slurm

POINTS: list[dict[str, Any]] = [
    {"resources.nodes": 2, "parallelism": {"tp": 2, "pp": 2, "sequence_parallel": True}},
    {"resources.nodes": 4, "parallelism": {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}},
]


def test_the_shipped_recipe_trains_the_same_over_nodes(site: Site) -> None:
    content = yaml.safe_load((ROOT / "recipes" / "tiny_parallel.yaml").read_text())
    content["sweep"] = {"points": POINTS}
    content["training"] |= {"steps": 8, "global_batch_size": 16}
    content["resources"] |= {"gpus_per_node": 2}
    done = site.run("sweep", site.write(content), seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr

    sweep = site.sweep("tiny_parallel")
    cells = read_plan(sweep).cells
    assert [cell.state for cell in cells] == ["run", "run"]
    two, four = (list(read_metrics(sweep.run(cell.run_ids[0]).attempt(1))) for cell in cells)
    assert len(two) == 8 and two[0].loss - two[-1].loss > 0.05
    # float32 resolves 5e-7 of such a loss. Sums in another order differ by a few such units.
    assert [step.loss for step in two] == pytest.approx([step.loss for step in four], abs=1e-5)
    allocations = [line for path in sweep.root.glob("bundles/*/allocations.jsonl") for line in read_json_lines(path)]
    assert sorted(len(line["nodes"]) for line in allocations) == [2, 4]
