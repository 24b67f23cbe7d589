"""A program of the user's own, from its recipe to its report: nothing in it knows of this project."""

from __future__ import annotations

import json

from tests.integration.host import Host

PROGRAM = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
run = torch.compile(model, backend="aot_eager") if "--compile" in sys.argv else model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = torch.randn(32, 8)
for step in range(int(sys.argv[1])):
    loss = (run(data) - data[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print({"step": step, "loss": loss.item()})
"""


def test_a_script_becomes_a_report(host: Host) -> None:
    (host.folder / "train.py").write_text(PROGRAM)
    content = {
        "name": "mine",
        "engine": "command",
        "command": {"run": "{python} train.py {steps}", "graphs": {"none": [], "compiled": ["--compile"]}},
        "training": {"steps": 110},
        "resources": {"device": "cpu"},
        "wandb": {"mode": "disabled"},
    }
    plan = host.run("plan", host.write(content))
    assert f"compiled: cd {host.folder}; '{{python}}' train.py 110 --compile" in plan.stdout
    done = host.run("sweep", host.write(content))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((host.sweep("mine").report / "report.json").read_text())
    (graphed,) = (cell for cell in report["cells"] if cell["impl"] == "command")
    assert graphed["verdict"]["verdict"] == "BITWISE", graphed["verdict"]
    assert graphed["replay"]["compiled_only"] and graphed["replay"]["stats"]["graphs"] == 1
    text = (host.sweep("mine").report / "report.md").read_text()
    assert "not applicable on a CPU: 1 compiled function" in text
    assert "| program.command | {python} train.py 110" in text and "| choices.loss | printed |" in text
