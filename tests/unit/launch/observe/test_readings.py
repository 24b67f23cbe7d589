"""Test the data that the observer keeps of a step until its numbers are known: it is little, and it is right."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from launch.common.atomic_files import dumps
from launch.contract.paths import AttemptPaths
from launch.contract.records.step_metrics import StepMetrics
from launch.contract.spec import Parallelism, RunSpec, Training
from launch.observe.steps import readings as readings_module
from launch.observe.steps import step_lines
from launch.observe.steps.metric_log import Known, MetricLog
from launch.observe.steps.readings import Moment, Readings
from launch.observe.steps.step_lines import StepLines


class Stream:
    """A queue of work that the GPU does later. ``current`` is the current stream."""

    current: ClassVar[Stream]
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.work: deque[Callable[[], object]] = deque()
        self.done = 0

    def run(self, until: float = math.inf) -> None:
        while self.work and self.done < until:
            self.work.popleft()()
            self.done += 1

    def query(self) -> bool:
        return not self.work

    synchronize = run


class Event:
    made = now = 0
    """The number of events made so far, and the time at which the next mark is set."""

    def __init__(self, enable_timing: bool = False) -> None:
        Event.made += 1

    def record(self, stream: Stream) -> None:
        self._stream, self._until = stream, stream.done + len(stream.work)
        self._time = Event.now

    def query(self) -> bool:
        return self._stream.done >= self._until

    def synchronize(self) -> None:
        self._stream.run(self._until)

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query()
        return float(later._time - self._time)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_subclass(torch.Tensor)


class OnDevice(torch.Tensor):
    is_cuda: ClassVar[bool] = True  # type: ignore[assignment]

    def write(self, number: float) -> None:
        Stream.current.work.append(lambda: plain(self).fill_(number))


class Pinned(torch.Tensor):
    made = 0

    def copy_(self, value: torch.Tensor, non_blocking: bool = False) -> Pinned:  # type: ignore[override]
        Stream.current.work.append(lambda: plain(self).copy_(plain(value)))
        return self


def empty_pinned(shape: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool) -> Pinned:
    Pinned.made += pin_memory
    return torch.zeros(shape, dtype=dtype, device=device).as_subclass(Pinned)


@pytest.mark.parametrize("handles", [False, True])
@pytest.mark.parametrize("streams", [1, 2])
def test_each_number_and_time_is_the_one_of_its_step_and_memory_and_events_serve_again(
    monkeypatch: pytest.MonkeyPatch, streams: int, handles: bool
) -> None:
    """The program overwrites its tensors in each step. The test reads values at random times, before or after the GPU
    has run."""
    monkeypatch.setattr(torch, "empty", empty_pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(readings_module, "_handle_of", lambda device: id(Stream.current) if handles else None)
    Event.made = Pinned.made = 0
    gpu, rng = [Stream() for _ in range(streams)], random.Random(streams)
    kinds = (torch.float32, torch.bfloat16)
    tensors = [[torch.zeros(1, dtype=kind, requires_grad=True).as_subclass(OnDevice) for kind in kinds] for _ in gpu]
    readings, waiting, moments = Readings(cuda=True), deque[tuple[float, Any]](), deque[Moment]()
    recorded: deque[Any] = deque()
    before: Moment | None = None
    for step in range(1000):
        Stream.current = rng.choice(gpu)
        for number in range(40 if step == 500 else 2):
            tensor = tensors[gpu.index(Stream.current)][number % 2]
            tensor.write(step % 100 + number)
            with torch.inference_mode(step == 0):
                waiting.append((step % 100 + number, readings.later(tensor)))
            if rng.random() < 0.2 and waiting[-1][1].ready():
                wanted, copy = waiting.pop()
                assert copy.read() == wanted
                continue
            if rng.random() < 0.01:
                waiting.pop()  # Nobody has read it.
            busy = rng.choice(gpu)
            busy.run(busy.done + rng.randrange(5))
            Stream.current = rng.choice(gpu)
        Event.now = step
        recorded.append(readings.record())
        while recorded and (len(recorded) > 10 or rng.random() < 0.5):
            moments.append(Moment((0, 0, 0), 0.0, 0.0, recorded.popleft()))
        while len(moments) > 20 or (moments and rng.random() < 0.5):
            assert moments[0].milliseconds_since(before) == (before is not None)
            before = moments.popleft()
        while len(waiting) > 40 or (waiting and (waiting[0][1].ready() or rng.random() < 0.1)):
            wanted, copy = waiting.popleft()
            assert copy.read() == wanted
    assert Pinned.made == len(kinds)
    assert Event.made < 40 if streams == 1 else Event.made < 2000


@pytest.mark.parametrize(
    "numbers", [(0.1, 1e-300, 2.5), (math.nan, 1.0, 0.0), (1.0, math.inf, 1e300), (1e308, 1e308, 0.0)]
)
def test_the_quick_line_is_the_usual_line(numbers: tuple[float, float, float]) -> None:
    step = StepMetrics(7, *numbers, 4096, "measure")
    assert step.line() == dumps(step)


def test_the_losses_of_micro_batches_add_up() -> None:
    log = MetricLog()
    for step in range(3):
        for part in (0.5, 0.25, 0.125):
            log.add_to("loss", "the program's own functions", step, Known(part))
    values = [log.at("loss", step) for step in range(3)]
    assert [value and value.read() for value in values] == [0.875] * 3


@pytest.mark.parametrize(("number", "writes"), [(0, False), (1, False), (2, False), (2, True)])
def test_ranks_that_do_not_write_end_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, writes: bool
) -> None:
    """The first or the last of three ranks writes. The run may have more steps than may wait for metrics."""
    tried: list[Path] = []
    create = step_lines.create
    monkeypatch.setattr(step_lines, "create", lambda path: tried.append(path) or create(path))
    monkeypatch.setattr(step_lines, "MOST_WAITING", 20)
    attempt = AttemptPaths(tmp_path)
    spec = RunSpec("command", parallelism=Parallelism(dp=3), training=Training(steps=100))
    recorder = SimpleNamespace(write=lambda *_, **__: None)
    rank: Any = SimpleNamespace(attempt=attempt, number=number, recorder=recorder)
    lines = StepLines(rank, spec, "optimizer steps")
    if not writes:
        attempt.metrics.touch()  # Another rank does this.
    for step in range(lines.last):
        for metric in ("loss", "grad_norm") if number else ():
            lines.log.add(metric, "printed", step, Known(1.0))
        lines.end_step(Moment((0, 0, 0), 0.0, 0.0), "measure")
        complete = lines.write(0)
        assert step < 10 or lines.log.at("loss", step - 10) is None, "what waits takes memory"
    assert complete and lines.ended == lines.last
    assert len(tried) == (number == 2), "each attempt costs a visit of the file system"
    assert lines.is_writer == (number == 0 or writes)
    if lines._file:
        lines._file.__exit__()


def test_an_only_rank_writes_its_steps_soon(tmp_path: Path) -> None:
    """The only rank is also the last rank, which otherwise waits for the first one."""
    recorder: Any = SimpleNamespace(write=lambda *_, **__: None)
    rank: Any = SimpleNamespace(attempt=AttemptPaths(tmp_path), number=0, recorder=recorder)
    lines = StepLines(rank, RunSpec("command"), "optimizer steps")
    for step in range(4):
        for metric in ("loss", "grad_norm"):
            lines.log.add(metric, "printed", step, Known(1.0))
        lines.end_step(Moment((0, 0, 0), 0.0, 0.0), "measure")
        lines.write(0)
    assert lines.written == 2
    if lines._file:
        lines._file.__exit__()
