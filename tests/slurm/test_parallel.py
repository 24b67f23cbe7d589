"""Layouts over nodes: the shipped recipe trains the same model on two and on four nodes of two tasks each."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from launch.files import read_json_lines
from launch.record import read_metrics, read_plan
from tests.integration.host import ROOT
from tests.slurm.site import Site

pytestmark = pytest.mark.slurm

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"tp": 2, "sequence_parallel": True}, {"tp": 2, "pp": 2, "sequence_parallel": True}],
    4: [{"pp": 2, "dp": 4, "ep": 2}, {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}],
}


@pytest.mark.parametrize("nodes", [2, 4])
def test_the_shipped_recipe_trains_the_same_over_nodes(site: Site, nodes: int) -> None:
    content = yaml.safe_load((ROOT / "recipes" / "tiny_parallel.yaml").read_text())
    content["sweep"]["grid"]["parallelism"] = LAYOUTS[nodes]
    content["training"] |= {"steps": 8, "global_batch_size": 16}
    content["resources"] |= {"nodes": nodes, "gpus_per_node": 2}
    done = site.run("sweep", site.write(content), seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr

    sweep = site.sweep("tiny_parallel")
    cells = read_plan(sweep).cells
    assert [cell.state for cell in cells] == ["run", "run"]
    one, other = (list(read_metrics(sweep.run(cell.run_ids[0]).attempt(1))) for cell in cells)
    assert len(one) == 8 and one[0].loss - one[-1].loss > 0.05
    # float32 resolves 5e-7 of such a loss; whoever adds up in another order is a few of them off.
    assert [step.loss for step in one] == pytest.approx([step.loss for step in other], abs=1e-5)
    allocations = [line for path in sweep.root.glob("bundles/*/allocations.jsonl") for line in read_json_lines(path)]
    assert [len(line["nodes"]) for line in allocations] == [nodes, nodes]
