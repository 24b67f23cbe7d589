"""Test a user's own program over two nodes: its own torchrun starts it once on each node, and srun once for each rank."""

from __future__ import annotations

import pytest

from launch.common.packed_files import unpack
from launch.contract.plan import read_plan
from tests.records import read_metrics
from tests.slurm.site import Site

pytestmark = pytest.mark.slurm

STEPS = 8
PROGRAM = """
import sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))
for step in range(int(sys.argv[1])):
    loss = (model(data) - data[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach() / ranks
    dist.all_reduce(total)
    if rank == ranks - 1:
        print({"step": step + 1, "loss": total.item()}, flush=True)
dist.barrier()
del loss, model, optimizer  # else they keep the process group, whose threads may then abort the interpreter's exit
dist.destroy_process_group()
"""
COMMANDS = {
    "torchrun": "{python} -m torch.distributed.run --nproc-per-node {ranks_per_node} train.py {steps}",
    "srun": "{python} train.py {steps}",
}


def test_two_nodes_of_two_ranks_train_one_model_however_they_start(site: Site) -> None:
    (site.folder / "train.py").write_text(PROGRAM)
    content = {
        "name": "mine",
        "engine": "command",
        "command": {"workdir": str(site.folder)},
        "training": {"steps": STEPS},
        "repeats": 1,
        "resources": {"device": "cpu", "nodes": 2, "gpus_per_node": 2},
        "wandb": {"mode": "disabled"},
        "sweep": {"points": [{"command": {"launcher": name, "run": run}} for name, run in COMMANDS.items()]},
    }
    done = site.run("sweep", site.write(content), seconds=600)
    sweep = site.sweep("mine")
    told = (file for part in ("logs", "events", "exits") for file in sweep.root.glob(f"runs/*/attempts/*/{part}/*"))
    texts = [f"--- {file}\n{file.read_text()[-4000:]}" for file in sorted(told) if file.is_file()]
    assert done.returncode == 0, "\n".join((done.stdout, done.stderr, *texts))
    by_node, by_rank = (list(read_metrics(sweep.run(cell.run_ids[0]).attempt(1))) for cell in read_plan(sweep).cells)
    by_torchrun = next(
        cell.run_ids[0] for cell in read_plan(sweep).cells if cell.spec["command"]["launcher"] == "torchrun"
    )
    # The second node's torchrun prints a traceback of its exit barrier if the first node's torchrun has ended before
    # it.
    log, _ = site.start("logs", by_torchrun, "--rank", "3").communicate(timeout=600)
    assert log.startswith(f"# {by_torchrun}, attempt 1, rank2.log, of the torchrun that started ranks 2 to 3\n")
    assert f"'step': {STEPS}," in log, "what rank 3 printed"
    assert len(by_node) == STEPS and [one.loss for one in by_node] == [one.loss for one in by_rank]


COMPILES = """
import pathlib
import subprocess
import sys
compiler = pathlib.Path("nvcc")
if not compiler.exists():
    compiler.write_text("#!/bin/sh\\nwhile :; do :; done\\n")
    compiler.chmod(0o755)
    try:
        subprocess.run(["./nvcc"], timeout=50)
    except subprocess.TimeoutExpired:
        print("compiled", flush=True)
if "--broken" in sys.argv:
    import not_there
"""


def test_a_silent_compilation_is_no_hang_and_a_broken_graph_costs_one_run(site: Site) -> None:
    (site.folder / "train.py").write_text(COMPILES + PROGRAM)
    run = "{python} -m torch.distributed.run --nproc-per-node 1 train.py {steps}"
    content = {
        "name": "mine",
        "engine": "command",
        "command": {"run": run, "workdir": str(site.folder), "graphs": {"broken": ["--broken"]}},
        "training": {"steps": STEPS},
        "repeats": 2,
        "resources": {"device": "cpu", "hang_minutes": 0.75},
        "wandb": {"mode": "disabled"},
    }
    done = site.run("sweep", site.write(content), seconds=600)
    assert list(site.states("mine").values()) == ["COMPLETED", "ENVIRONMENT", "SKIPPED", "COMPLETED"], done.stdout
    first = site.sweep("mine").run(next(iter(site.states("mine")))).attempt(1)
    assert b"compilers work" in unpack(first.logs_pack)["logs/launcher.log"]
    assert set(site.accounts("State").values()) == {"COMPLETED"}, "nothing is submitted again"
