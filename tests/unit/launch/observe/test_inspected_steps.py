"""Test what `advise` sees in a user's program, with a stand-in for the GPU, its profiler and its warnings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from launch.common.typed_json import from_json
from launch.contract.records.inspection import INSPECTED_STEPS, OF_OPERATORS, OF_TRACES, Finding, Inspection
from launch.contract.records.probe import HOST_STEPS, Probe
from launch.frameworks.command_line import observed_steps
from launch.observe import start
from launch.observe.steps.inspected_steps import Launch, changed_kernels, launched_by_step
from launch.train.inspection.source_line import current_program_line
from tests.unit.launch.observe.observed import PROGRAM, STEPS, observe, spec_of

GPU = """
import time, warnings
import launch.observe.steps.inspected_steps as inspected_steps
from launch.train.inspection.step_operators import StepOperators
from tests.unit.launch.observe.test_inspected_steps import Event
import torch
taken, modes, events = [7], [], []

class Trace:
    def end_events(self): return events

def launch(kernel, blocks=8):
    now, id = time.time_ns(), len(events)
    events.append(Event("cudaLaunchKernel", now, id, cuda=False))
    events.append(Event(kernel, now + 1000, id, blocks))

def read(loss):
    now = time.time_ns()
    events.append(Event("cudaStreamSynchronize", now, -1, cuda=False))
    if modes == ["warn"]:
        warnings.warn("called a synchronizing CUDA operation")
    return loss.item()

inspected_steps.StepsTrace = lambda: events.clear() or Trace()
inspected_steps.StepOperators = lambda device, find_line: StepOperators(torch.device("cpu"), find_line)
torch.cuda.synchronize = lambda: None
torch.cuda.memory_stats = lambda: {"num_device_alloc": taken[0]}
torch.cuda.get_sync_debug_mode = lambda: 0
torch.cuda.set_sync_debug_mode = modes.append
"""
"""A stand-in for what an inspection asks of a GPU. The program calls ``launch`` for its kernels and ``read`` to wait."""


@dataclass(frozen=True)
class Event:
    """An event of the profiler: a call of the driver, or a kernel of 1 microsecond. Times are in nanoseconds."""

    kernel: str
    start: int
    id: int
    blocks: int = 0
    cuda: bool = True

    def name(self) -> str:
        return self.kernel

    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.cuda else DeviceType.CPU

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return 1000

    def correlation_id(self) -> int:
        return self.id

    def metadata_json(self) -> str:
        return f'"stream": 7, "grid": [{self.blocks}, 1, 1], "block": [32, 1, 1]' if self.cuda else ""


def program(line: str, *, reads: bool) -> str:
    """Return the program with one more ``line`` in each step. It reads its loss in a line of its own, or not at all."""
    text = PROGRAM.replace("torch.randn(STEPS", "torch.randn(STEPS + 8").replace(
        "    model.zero", f"    {line}\n    model.zero"
    )
    shown = "    value = read(loss)\n    launch('add')\n" if reads else "    value = loss.item()\n"
    return GPU + text.replace("    print(", f"{shown}    print(").replace("loss.item()})", "value})")


def inspected(folder: Path, line: str, *, reads: bool = False) -> tuple[Probe, Inspection]:
    spec = dataclasses.replace(spec_of(steps=STEPS, device="cuda"), inspect=True)
    seen = observe(folder, program(line, reads=reads), spec)
    assert seen.diagnosis.outcome == "COMPLETED", seen.diagnosis
    assert [one.step for one in seen.steps] == list(range(STEPS)), "inspected steps are not timed"
    (probe,), (inspection,) = seen.events("probe"), seen.events("inspection")
    return from_json(Probe, probe["probe"]), from_json(Inspection, inspection["inspection"])


def test_the_program_takes_the_steps_of_the_inspection() -> None:
    plain, on_cpu = spec_of(device="cuda"), spec_of()
    further = HOST_STEPS + INSPECTED_STEPS
    assert observed_steps(dataclasses.replace(plain, inspect=True)) == observed_steps(plain) + further
    assert observed_steps(dataclasses.replace(on_cpu, inspect=True)) == observed_steps(on_cpu) + INSPECTED_STEPS


def test_a_steady_step_has_no_finding(tmp_path: Path) -> None:
    probe, found = inspected(tmp_path, "launch('gemm'); launch('add')")
    assert found.findings == () and found.waits == 0
    assert found.sought == (*OF_TRACES, *OF_OPERATORS)
    assert found.kernels is not None and found.kernels.number == probe.kernels == 2
    assert probe.host_ms is not None and probe.host_ms > 0


def test_a_wait_is_found_with_the_line_of_the_program(tmp_path: Path) -> None:
    """The last wait follows the last inspected step, so three steps show two or three."""
    probe, found = inspected(tmp_path, "launch('gemm')", reads=True)
    (finding,) = found.findings
    text = program("launch('gemm')", reads=True).splitlines()
    assert (finding.kind, finding.file, finding.function) == ("synchronisation", "train.py", "read")
    assert text[finding.line - 1].strip().startswith("warnings.warn(") and finding.count in (2 / 3, 1.0)
    assert found.waits > 0 and probe.host_ms is None


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        ("[launch('gemm') for _ in range(2 + number % 2)]", "2 kernels in one step, 3 in another"),
        ("launch('even' if number % 2 else 'odd')", " in one step, "),
        ("launch('gemm', 8 + number % 2)", "gemm has "),
    ],
)
def test_kernels_that_change_are_one_finding(tmp_path: Path, line: str, detail: str) -> None:
    _, found = inspected(tmp_path, line)
    (finding,) = found.findings
    assert (finding.kind, finding.file, finding.line) == ("kernels", "", 0)
    assert detail in finding.detail or finding.detail == "3 kernels in one step, 2 in another"


def test_memory_that_a_step_takes_from_the_driver_is_found(tmp_path: Path) -> None:
    _, found = inspected(tmp_path, "launch('gemm'); taken[0] += 1")
    assert [(one.kind, one.count) for one in found.findings] == [("allocation", 1.0)]


# --- operators ------------------------------------------------------------------------------------------------------


def longer(line: str, head: str = "") -> str:
    """Return the program with ``head`` before it and one more ``line`` in each step."""
    text = PROGRAM.replace("torch.randn(STEPS", "torch.randn(STEPS + 2").replace(
        "    model.zero", f"    {line}\n    model.zero"
    )
    return text.replace("import torch\n", f"import torch\n{head}\n", 1)


def inspected_on_cpu(folder: Path, program: str) -> Inspection:
    seen = observe(folder, program, dataclasses.replace(spec_of(steps=STEPS), inspect=True))
    assert seen.diagnosis.outcome == "COMPLETED", (seen.diagnosis, seen.log)
    assert [one.step for one in seen.steps] == list(range(STEPS)) and not seen.events("probe")
    (inspection,) = seen.events("inspection")
    return from_json(Inspection, inspection["inspection"])


def only(found: Inspection) -> Finding:
    (finding,) = found.findings
    assert found.sought == OF_OPERATORS and (finding.file, finding.function) == ("train.py", "<module>")
    return finding


def test_equal_steps_have_no_finding_on_a_cpu(tmp_path: Path) -> None:
    """A value that is logged in one of two steps changes nothing on the device."""
    found = inspected_on_cpu(tmp_path, longer("number % 2 and loss.item()"))
    assert found == Inspection((), sought=OF_OPERATORS)


@pytest.mark.parametrize(
    ("line", "kind", "detail", "count"),
    [
        ("batch[batch > 0].sum()", "shape", "aten.index.Tensor gave (", 1.0),
        ("number % 2 and batch.cos()", "operators", "aten.cos", 1.0),
        ("torch.rand(3)", "default generator", "aten.rand", 1.0),
        (
            "number % 2 and torch.rand(3, generator=torch.Generator().manual_seed(number))",
            "generator",
            "aten.rand",
            0.5,
        ),
    ],
    ids=["shape", "operators", "default generator", "own generator"],
)
def test_what_changes_in_a_program_is_found_with_its_line(
    tmp_path: Path, line: str, kind: str, detail: str, count: float
) -> None:
    found = inspected_on_cpu(tmp_path, longer(line))
    finding = only(found) if kind != "generator" else next(one for one in found.findings if one.kind == kind)
    assert (finding.kind, finding.count) == (kind, count) and detail in finding.detail
    assert longer(line).splitlines()[finding.line - 1].strip() == line


MODE = """
from torch.utils._python_dispatch import TorchDispatchMode
class Mine(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
number = 0
"""


def test_a_mode_of_the_program_around_its_steps_is_no_obstacle(tmp_path: Path) -> None:
    found = inspected_on_cpu(tmp_path, longer("batch[batch > 0].sum()", f"{MODE}Mine().__enter__()"))
    assert only(found).kind == "shape"


def test_a_mode_that_begins_within_an_inspected_step_leaves_operators_unknown(tmp_path: Path) -> None:
    found = inspected_on_cpu(tmp_path, longer(f"number == {STEPS} and Mine().__enter__()", MODE))
    assert found == Inspection((), sought=())


# --- kernels by step ------------------------------------------------------------------------------------------------

CALLS = [Event("cudaLaunchKernel", time, time, cuda=False) for time in (10, 20, 30, 40)]
KERNELS = [Event(name, 100 + id, id, blocks=2) for name, id in (("a", 10), ("b", 20), ("a", 30), ("b", 40))]


def test_kernels_belong_to_the_step_in_which_the_host_launched_them() -> None:
    """The device runs them after both steps have ended."""
    first, second = launched_by_step([*reversed(KERNELS), *CALLS], [25, 45])
    assert first == second == [Launch("a", "2,1,1"), Launch("b", "2,1,1")]
    assert changed_kernels([first, second]) == []
    assert launched_by_step([*CALLS, *KERNELS], [25, 35]) == [first, [Launch("a", "2,1,1")]], (
        "later launches do not count"
    )


@pytest.mark.parametrize(
    ("events", "ends"),
    [([*CALLS[1:], *KERNELS], [25, 45]), ([*CALLS, *KERNELS], [5, 45]), ([], [25, 45])],
    ids=["a launch was missed", "clocks differ", "no kernel"],
)
def test_steps_that_cannot_be_told_apart_are_unknown(events: list[Event], ends: list[int]) -> None:
    assert launched_by_step(events, ends) == [] and changed_kernels([]) == []


# --- lines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("site-packages/trainer/loop.py", "trainer/loop.py"),
        ("program/train.py", "train.py"),
        (f"{Path(torch.__file__).parent}/nn/wait.py", ""),
        (f"{Path(start.__file__).parent}/observer.py", ""),
        ("<string>", ""),
    ],
    ids=["a trainer", "the program", "PyTorch", "the observer", "no file"],
)
def test_the_innermost_line_outside_pytorch_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str
) -> None:
    """A trainer or a program calls what waits. Its own caller, this test, is named only if neither is the user's."""
    for folder in ("site-packages", "program"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    path = file if file.startswith("<") else str(tmp_path / file)
    names = {"find": current_program_line}
    exec(compile("def wait():\n    return find()\nline = wait()\n", path, "exec"), names)
    line: Any = names["line"]
    here = Path(__file__).relative_to(Path(__file__).parents[4]).as_posix()
    assert line.name == (name or here) and (line.function == "wait") == bool(name)
