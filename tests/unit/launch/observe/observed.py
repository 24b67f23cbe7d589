"""Run a small program under the observer in a forked child, which imports neither torch nor the observer again."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils  # Import this here, or every child process imports it.

from launch.common.atomic_files import write_json
from launch.contract.paths import OBSERVED, AttemptPaths
from launch.contract.records.events import read_events
from launch.contract.records.step_metrics import StepMetrics
from launch.contract.spec import Command, CudaGraph, Device, Placement, RunSpec, Training, spec_to_json
from launch.failures.diagnose import Diagnosis, diagnose
from launch.failures.evidence import read_evidence
from launch.observe import observer, rank, start, torch_hooks  # noqa: F401 (here for the same reason)
from tests.records import read_metrics

STEPS = 12
SECONDS = 100
"""A program that still runs after this time hangs and is killed."""
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


GPU = """
import time
from types import SimpleNamespace
import launch.train.telemetry.event_log as event_log
import launch.train.telemetry.memory as memory
from launch.contract.records.memory import Memory
from launch.contract.records.probe import Launches, Probe, Probed
from launch.train.telemetry.kernel_times import kernels_of
from launch.observe import rank
from launch.observe.steps import training_steps

class Graph:
    capturing, breaks = False, ""
    def capture_begin(self): self._break("begin"); Graph.capturing = True
    def capture_end(self): Graph.capturing = False; self._break("end")
    def _break(self, when):
        if self.breaks == when: raise RuntimeError("the capture fails")
    def replay(self): pass

class AcceleratorGraph:
    breaks, _break = "", Graph._break
    capture_begin, capture_end, replay = Graph.capture_begin, Graph.capture_end, Graph.replay

class Event:
    set, seconds = 0, float("inf")
    def __init__(self, enable_timing=False): pass
    def record(self, stream): self.time = time.perf_counter(); Event.set += 1
    waited = False
    def query(self):
        assert not Graph.capturing, "a query breaks a capture"
        return self.waited or time.perf_counter() - self.time >= self.seconds
    def synchronize(self): self.waited = True
    def elapsed_time(self, later): return (later.time - self.time) * 1e3

class Clocks:
    def __init__(self, device): self.unknown = ""
    def end_phase(self): return None

class Trace:
    def end(self, steps): return Probed(Probe(1.0, 10.0, 1.0, 1.0, None), kernels_of([], steps), Launches(9.0, 1.0, 0.0))

torch.cuda.graphs.CUDAGraph = torch.cuda.CUDAGraph = Graph
torch.accelerator.Graph = AcceleratorGraph
torch.cuda.Event, torch.cuda.current_device = Event, lambda: 0
torch.cuda.current_stream = lambda device=None: SimpleNamespace(device=torch.device("cuda", 0))
torch.cuda.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: Graph.capturing
memory.sample, memory.reset_peaks = lambda device: Memory(1, 1), lambda device: True
event_log.PhaseClocks, training_steps.StepsTrace = Clocks, Trace
"""
"""A stand-in for a GPU: its graphs do nothing, and the host's clock times its events.

It passes an event ``Event.seconds`` later, by default only when it is waited for. A time between would make the records depend
on the load of this host: the observer notes its choices as soon as the GPU has passed the first steps.
"""


@dataclass(frozen=True)
class Observed:
    """The records of a program, and the diagnosis that a supervisor would make."""

    attempt: AttemptPaths
    diagnosis: Diagnosis

    @property
    def steps(self) -> list[StepMetrics]:
        return list(read_metrics(self.attempt)) if self.attempt.metrics.exists() else []

    @property
    def log(self) -> str:
        """Return what rank 0 printed."""
        return self.attempt.log(0).read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.attempt, 0) if event["kind"] == kind]


def spec_of(*, graphed: bool = False, steps: int = STEPS, device: Device = "cpu") -> RunSpec:
    graph = CudaGraph("command", name="compiled", arguments=("--compile",)) if graphed else CudaGraph()
    command, placement = Command(run="python train.py"), Placement(device)
    return RunSpec("command", training=Training(steps=steps), cuda_graph=graph, command=command, placement=placement)


def observe(
    folder: Path,
    program: str,
    spec: RunSpec,
    *,
    compiled: bool | None = None,
    gpu: bool = True,
    is_described: bool = False,
) -> Observed:
    """Run ``program`` as the ranks of an attempt in ``folder``. By default it compiles if ``spec`` is graphed;
    ``compiled`` overrides this.

    On ``cuda`` it uses the stand-in for a GPU, unless there is no ``gpu``. Rank 0's exit code counts. environment.json
    is empty unless the program ``is_described``, which takes as long as the rest.
    """
    attempt = AttemptPaths(folder / "runs" / spec.run_id / "attempts" / "1")
    attempt.logs.mkdir(parents=True)
    spec = replace(spec, command=replace(spec.command, workdir=str(folder)))
    write_json(attempt.spec, spec_to_json(spec))
    describe = rank.describe_program if is_described else lambda *_: dict[str, Any]()
    names = {"STEPS": STEPS, "COMPILE": spec.graphed if compiled is None else compiled, "__name__": "__main__"}
    before, children = GPU if gpu and spec.placement.device == "cuda" else "", []
    ranks = spec.parallelism.world_size
    for number in range(ranks):
        children.append(os.fork())
        if children[-1] == 0:
            rank.describe_program = describe
            place = {"RANK": str(number), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            _run(attempt, program, names, before, place)
    code, *_ = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    evidence = replace(read_evidence(attempt, "itself"), exit_code=code, is_command=True)
    return Observed(attempt, diagnose(evidence))


def _run(attempt: AttemptPaths, program: str, names: dict[str, Any], before: str, place: dict[str, str]) -> None:
    """Run ``program`` as Python would, and end the process. ``place`` are the variables of its rank, if there are several."""
    code = 0
    gc.freeze()  # The observer looks for modules among all objects of its process, and tests have many.
    signal.alarm(SECONDS)
    try:
        os.environ |= place
        os.environ[OBSERVED] = str(attempt.root)
        torch.set_num_threads(1)
        # Without this reset, the program would start with code that other tests compiled in this process.
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        log = os.open(attempt.log(int(place.get("RANK", 0))), os.O_WRONLY | os.O_CREAT)
        sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
        atexit._clear()
        exec(before, {"torch": torch})
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
