"""On a GPU: the whole line over eager cells, and a step that never makes the host wait."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch.data import batch, open_source
from launch.engines.base import Mesh
from launch.engines.torch_native.engine import build
from launch.record import PHASES, AttemptPaths, read_events, read_metrics
from launch.spec import Model, Parallelism, Placement, RunSpec, Training

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
MOE = Model(
    num_layers=2, hidden_size=128, kv_channels=32, num_query_groups=2, qk_layernorm=True,
    num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128, moe_aux_loss_coeff=1e-3,
)  # fmt: skip
RECIPE = """\
name: gpu_eager
model: {preset: tiny_moe}
training: {steps: 40, sequence_length: 256, micro_batch_size: 2, global_batch_size: 8, precision: bf16}
repeats: 1
sweep: {grid: {training.deterministic: [false, true]}}
resources: {device: cuda, minutes_per_run: 3, hang_minutes: 2}
"""


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("model", [Model(), MOE], ids=["dense", "moe"])
def test_a_step_makes_the_host_wait_for_nothing(model: Model) -> None:
    device = torch.device("cuda", 0)
    training = Training(steps=8, global_batch_size=4, micro_batch_size=2, precision="bf16")
    spec = RunSpec(model=model, training=training, parallelism=Parallelism(), placement=Placement(device="cuda"))
    engine = build(spec, Mesh(0, 1, device))
    source = open_source(spec.data, model.vocab_size, training.seed)
    batches = [batch(source, spec, step, 0).to(device) for step in range(6)]
    engine.step(batches[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [engine.step(tokens).loss for tokens in batches[1:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(loss) for loss in losses)


def test_eager_cells_run_from_recipe_to_report(tmp_path: Path) -> None:
    recipe, store = tmp_path / "gpu_eager.yaml", tmp_path / "sweeps"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "orchestrator", "sweep", str(recipe), "--store", str(store), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {cell["outcome"] for cell in json.loads(done.stdout)["cells"]} == {"COMPLETED"}
    attempts = sorted(store.glob("gpu_eager/runs/*/attempts/1"))
    assert len(attempts) == 2
    for folder in attempts:
        attempt = AttemptPaths(folder)
        assert [step.step for step in read_metrics(attempt)] == list(range(40))
        phases = {event["phase"]: event["memory"] for event in read_events(attempt, 0) if event["kind"] == "phase"}
        assert set(phases) == set(PHASES) - {"capture"}
        assert phases["measure"]["peak_allocated"] >= phases["measure"]["allocated"] > 0
        assert all(value is not None for value in phases["measure"].values())
        environment = json.loads(attempt.environment.read_text())
        assert environment["hardware"]["gpus"] and environment["hardware"]["driver"]
