"""On a GPU, test verdicts on programs that capture by hand, and evaluate between their steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
import torch
from launch.observe import step as end_step
torch.manual_seed(0)
torch.set_default_device("cuda")
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
inputs, outputs, graphs = {}, {}, {}

def train(inputs):
    optimizer.zero_grad(set_to_none=False)
    loss = model(inputs).square().mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
    optimizer.step()
    return torch.stack([loss.detach(), norm])

@torch.no_grad()
def evaluate(inputs):
    return model(inputs).mean()

def run(work, batch, *, capture):
    name = work.__name__
    if "--graph" not in sys.argv or not (capture or name in graphs):
        return work(batch)
    if capture:
        inputs[name], graphs[name] = batch.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            outputs[name] = work(inputs[name])
    inputs[name].copy_(batch)
    graphs[name].replay()
    return outputs[name]

with torch.cuda.stream(torch.cuda.Stream()):
    for step in range(int(sys.argv[1])):
        loss, norm = run(train, torch.randn(32, 64), capture=step == 5).clone()
        end_step(loss=loss, grad_norm=norm)
        if step % 10 == 9:
            if "--forgets" in sys.argv and step == 59:
                graphs.clear()
            print("val loss", run(evaluate, torch.randn(8, 64), capture=step == 29).item())
"""


@pytest.mark.parametrize(("flags", "verdict"), [("", "BITWISE"), ("--forgets", "INCOMPARABLE")])
def test_an_evaluation_with_a_graph_of_its_own_keeps_the_proof(tmp_path: Path, flags: str, verdict: str) -> None:
    """A program that runs without its graph after an evaluation has no proof."""
    (tmp_path / "train.py").write_text(PROGRAM)
    run = f"{sys.executable} {tmp_path}/train.py {{steps}} {flags}".strip()
    command = [sys.executable, "-m", "orchestrator", "wrap", "--eager", run, "--graphed", f"{run} --graph"]
    options = ["--repeats", "2", "--executor", "local", "--store", str(tmp_path / "sweeps")]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    (path,) = (tmp_path / "sweeps").glob("*/report/report.json")
    cell = graphed_cell(json.loads(path.read_text()))
    assert cell["verdict"]["verdict"] == verdict, done.stdout + done.stderr
    assert cell["replay"]["proven"] == (verdict == "BITWISE")


def graphed_cell(report: dict[str, Any]) -> dict[str, Any]:
    (cell,) = [one for one in report["cells"] if one["label"] != "eager"]
    return dict(cell)
