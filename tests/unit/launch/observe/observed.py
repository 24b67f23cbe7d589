"""Run a small program under the observer in a forked child, which costs no import of torch."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils  # here, or every child imports it

from launch.common.atomic_files import write_json
from launch.contract.paths import OBSERVED, AttemptPaths
from launch.contract.records.events import read_events
from launch.contract.records.step_metrics import StepMetrics, read_metrics
from launch.contract.spec import Command, CudaGraph, RunSpec, Training, spec_to_json
from launch.failures.diagnose import Diagnosis, diagnose
from launch.failures.evidence import read_evidence
from launch.observe import start

STEPS = 12
PROGRAM = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
run = torch.compile(model, backend="eager", dynamic=False) if COMPILE else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(STEPS, 8, 4)
for number, batch in enumerate(data):
    loss = run(batch).square().mean()
    model.zero_grad()
    loss.backward()
    optimizer.step()
    print({"step": number, "loss": loss.item()})
"""


@dataclass(frozen=True)
class Observed:
    """What a program left behind, and what a supervisor would say of it."""

    attempt: AttemptPaths
    diagnosis: Diagnosis

    @property
    def steps(self) -> list[StepMetrics]:
        return list(read_metrics(self.attempt)) if self.attempt.metrics.exists() else []

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.attempt, 0) if event["kind"] == kind]


def spec_of(*, graphed: bool = False, steps: int = STEPS) -> RunSpec:
    graph = CudaGraph("command", name="compiled", arguments=("--compile",)) if graphed else CudaGraph()
    return RunSpec("command", training=Training(steps=steps), cuda_graph=graph, command=Command(run="python train.py"))


def observe(folder: Path, program: str, spec: RunSpec, *, compiled: bool | None = None) -> Observed:
    """Run ``program`` as rank 0 of an attempt in ``folder``. It compiles where ``spec`` is graphed, unless ``compiled`` says."""
    attempt = AttemptPaths(folder / "runs" / spec.run_id / "attempts" / "1")
    attempt.logs.mkdir(parents=True)
    spec = replace(spec, command=replace(spec.command, workdir=str(folder)))
    write_json(attempt.spec, spec_to_json(spec))
    names = {"STEPS": STEPS, "COMPILE": spec.graphed if compiled is None else compiled, "__name__": "__main__"}
    child = os.fork()
    if child == 0:
        _run(attempt, program, names)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    evidence = replace(read_evidence(attempt, "itself"), exit_code=code, is_command=True)
    return Observed(attempt, diagnose(evidence))


def _run(attempt: AttemptPaths, program: str, names: dict[str, Any]) -> None:
    """Run ``program`` as Python would, and end the process."""
    code = 0
    try:
        os.environ[OBSERVED] = str(attempt.root)
        torch.set_num_threads(1)
        log = os.open(attempt.log(0), os.O_WRONLY | os.O_CREAT)
        sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
        atexit._clear()
        start.start()
        exec(compile(program, "train.py", "exec"), names)
    except BaseException as error:
        code = 1
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
    try:
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
