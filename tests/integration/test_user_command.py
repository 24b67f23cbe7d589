"""Test a user's own program from its recipe to its report. Nothing in the program knows this project."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.integration.host import Host, program_recipe

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
RUN, GRAPHS = "{python} train.py {steps}", {"none": [], "compiled": ["--compile"]}


def test_a_script_becomes_a_report(host: Host) -> None:
    (host.folder / "train.py").write_text(PROGRAM)
    content = program_recipe("mine", RUN, GRAPHS)
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
    assert "has changed" not in host.run("sweep", host.write(content)).stderr
    (host.folder / "train.py").write_text(PROGRAM + "\n")
    again = host.run("sweep", host.write(content))
    assert f"{host.folder}: its code has changed since the runs on disk" in again.stderr and "2 on disk" in again.stdout


LOADS = """
import sys
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
def forward(batch):
    return checkpoint(model, batch, use_reentrant=False) if "--recompute" in sys.argv else model(batch)
run = torch.compile(forward, backend="aot_eager") if "--compile" in sys.argv else forward
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20 if "--decay" in sys.argv else 1000)
order = torch.Generator().manual_seed(1 if "--decay" in sys.argv else 2)
loader = DataLoader(torch.randn(2000, 8), batch_size=16, shuffle=True, generator=order)
for step, batch in enumerate(loader):
    if step == int(sys.argv[1]):
        break
    used = batch if step < 4 or "--stale" not in sys.argv else used
    loss = (run(used) - used[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print({"step": step, "loss": loss.item()})
"""


def test_another_schedule_another_order_and_recomputation_are_named(host: Host) -> None:
    """Stale inputs are a fault of graphs, and the loader gives the same batches there. A lone eager run leaves it INCONCLUSIVE."""
    (host.folder / "train.py").write_text(LOADS)
    usual = ["--recompute", "--decay"]
    graphs = {"same": ["--compile", *usual], "stale": ["--compile", *usual, "--stale"], "other": ["--compile"]}
    done = host.run("sweep", host.write(program_recipe("mine", RUN, {"none": usual, **graphs})))
    report = json.loads((host.sweep("mine").report / "report.json").read_text())
    same, stale, other = (cell["verdict"] for cell in report["cells"] if cell["impl"] == "command")
    assert same["verdict"] == "BITWISE", (same, done.stderr)
    assert stale["verdict"] == "INCONCLUSIVE" and "choices" not in stale["reason"], stale
    assert other["verdict"] == "INCOMPARABLE", other
    for said in (
        "choices.batches: ",
        "choices.recomputation: checkpoints (eager), none (graphed)",
        "generator seed 1) (eager), RandomSampler (replacement False, generator seed 2) (graphed)",
        "StepLR (step_size 20, gamma 0.1) (eager), StepLR (step_size 1000, gamma 0.1) (graphed)",
    ):
        assert said in other["reason"], (said, other["reason"])


HARDLY_SEEN = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model.shift = torch.nn.Parameter(torch.zeros(4))
def forward(batch):
    return model(batch) + 1e-3 * torch.tanh(model.shift - 1).sum()
run = torch.compile(forward, backend="aot_eager") if "--compile" in sys.argv else forward
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(32, 8)
for step in range(int(sys.argv[1])):
    rows = data.flip(0) if "--compile" in sys.argv else data
    loss = (run(rows) - rows[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if "--wrong" in sys.argv and step >= 17:
        model.shift.grad.neg_()
    optimizer.step()
    print({"step": step, "loss": loss.item()})
"""


def test_a_gradient_that_is_wrong_after_the_first_replays_does_not_pass(host: Host) -> None:
    """Curves differ by rounding, since rows in another order are summed in another order, and hardly show the wrong parameter.

    Eager repeats are equal, so the perturbed run shows that rounding does not take the parameter there.
    """
    (host.folder / "train.py").write_text(HARDLY_SEEN)
    content = program_recipe("mine", RUN, {"none": [], "sound": ["--compile"], "wrong": ["--compile", "--wrong"]})
    done = host.run("sweep", host.write({**content, "repeats": 2}))
    report = json.loads((host.sweep("mine").report / "report.json").read_text())
    sound, wrong = (cell["verdict"] for cell in report["cells"] if cell["impl"] == "command")
    assert sound["verdict"] == "EQUIVALENT" and sound["evidence"]["max_loss_difference"] > 0, (sound, done.stderr)
    assert wrong["verdict"] == "INCONCLUSIVE" and not wrong["needed_run"], wrong
    assert "parameters end far from those of eager runs: shift on rank 0 by " in wrong["reason"], wrong
    assert wrong["evidence"]["max_loss_difference"] < 1e-3, "curves alone would pass"


HUGGINGFACE = """
import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
rows = [torch.randint(0, 64, (16,)) for _ in range(64)]
Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()
"""
LIGHTNING = """
import sys
import lightning.pytorch as lightning
import torch
from lightning.pytorch.loggers import CSVLogger

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.run = torch.compile(self.layer, backend="aot_eager") if "--compile" in sys.argv else self.layer

    def training_step(self, batch, _):
        loss = (self.run(batch[0]) - batch[0][:, :1]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

lightning.seed_everything(0)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=8)
quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
logger = CSVLogger(sys.argv[2])
trainer = lightning.Trainer(max_steps=int(sys.argv[1]), log_every_n_steps=1, logger=logger, accelerator="cpu", **quiet)
trainer.fit(Model(), data)
"""
COMPILE = ["--torch_compile", "True", "--torch_compile_backend", "aot_eager"]
TRAINERS = {
    "huggingface": (
        "accelerate", HUGGINGFACE, "--per_device_train_batch_size 4 --report_to none --save_strategy no --use_cpu True", COMPILE,
        ("the program's own functions", "the program's own functions"),
    ),
    "lightning": ("lightning", LIGHTNING, "{steps} {output}", ["--compile"], ("its logger", "computed by the observer")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("framework", TRAINERS)
def test_a_trainer_becomes_a_report(host: Host, framework: str) -> None:
    package, program, arguments, graphs, sources = TRAINERS[framework]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, of the extra dev")
    (host.folder / "train.py").write_text(program)
    run = f"{{python}} -W ignore train.py {arguments}"
    content = program_recipe(framework, run, {"compiled": graphs}, framework=framework)
    done = host.run("sweep", host.write(content))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((host.sweep(framework).report / "report.json").read_text())
    (graphed,) = (cell for cell in report["cells"] if cell["impl"] == "command")
    assert graphed["verdict"]["verdict"] == "BITWISE", graphed["verdict"]
    text = (host.sweep(framework).report / "report.md").read_text()
    assert f"| choices.loss | {sources[0]} |" in text and f"| choices.grad_norm | {sources[1]} |" in text


def test_repeats_that_would_only_fail_alike_are_skipped_until_their_first_one_is_mended(host: Host) -> None:
    (host.folder / "train.py").write_text(f"import sys\nif '--compile' in sys.argv: import not_there\n{PROGRAM}")
    content = program_recipe("mine", RUN, GRAPHS) | {"repeats": 3}
    done = host.run("sweep", host.write(content))
    assert list(host.states("mine").values()).count("ENVIRONMENT") == 1 and done.returncode != 0
    status = host.run("status", "mine").stdout
    assert "mine: 3 COMPLETED, 1 ENVIRONMENT, 2 SKIPPED" in status
    assert "not tried: repeat 0 ended as ENVIRONMENT (IMPORT) in init; resume --failed tries again" in status
    report = (host.sweep("mine").report / "report.md").read_text()
    assert (
        "- **SKIPPED** A1, repeats 1, 2: not tried: repeat 0 ended as ENVIRONMENT (IMPORT) in init" in report
        and "no attempt has begun" not in report
    )
    (host.folder / "train.py").write_text(PROGRAM)
    host.run("resume", "mine", "--failed")
    assert set(host.states("mine").values()) == {"COMPLETED"}


def test_a_misspelt_option_costs_one_run_of_the_sweep(host: Host) -> None:
    options = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--steps', type=int)\n"
    (host.folder / "train.py").write_text(f"{options}sys_argv = parser.parse_args()\n{PROGRAM}")
    content = program_recipe("mine", "{python} train.py --stepz {steps} --batch {micro_batch_size}", GRAPHS)
    grid = {"training.micro_batch_size": [1, 2]}
    done = host.run("sweep", host.write(content | {"repeats": 2, "sweep": {"grid": grid}}))
    states = host.states("mine")
    assert sorted(states.values()) == ["CONFIG", *["SKIPPED"] * 7], done.stdout
    status = host.run("status", "mine").stdout
    (failed,) = (run for run, state in states.items() if state == "CONFIG")
    assert f"not tried: {failed} has the same command but for numbers, and ended as CONFIG (OPTIONS)" in status
    assert (
        f"no eager run to compare with, since repeat 0 of {failed.removesuffix('-r0')} ended as CONFIG (OPTIONS)"
        in status
    )
    assert "train.py: error: unrecognized arguments: --stepz 110" in status and "resume mine --failed" in status
    report = json.loads((host.sweep("mine").report / "report.json").read_text())
    verdicts = [cell["verdict"]["verdict"] for cell in report["cells"] if cell["impl"] == "command"]
    assert verdicts == ["INCOMPARABLE"] * 2 and done.returncode == 3
    text = (host.sweep("mine").report / "report.md").read_text()
    assert "- **SKIPPED** A1, repeats 0, 1: not tried: no eager run to compare with, since" in text
