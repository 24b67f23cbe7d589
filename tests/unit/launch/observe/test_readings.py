"""What the observer keeps of a step until its numbers are known: little, and the right numbers."""

from __future__ import annotations

import math
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from launch.common.atomic_files import dumps
from launch.contract.paths import AttemptPaths
from launch.contract.records.step_metrics import StepMetrics
from launch.contract.spec import Parallelism, RunSpec, Training
from launch.observe.steps import step_lines
from launch.observe.steps.metric_log import Known, MetricLog
from launch.observe.steps.readings import Moment, Readings
from launch.observe.steps.step_lines import StepLines


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda: ClassVar[bool] = True  # type: ignore[assignment]


class Event:
    """An event that completes three records later."""

    made = records = 0

    def __init__(self, enable_timing: bool = False) -> None:
        Event.made += 1

    def record(self, stream: Any = None) -> None:
        Event.records += 1
        self._at = Event.records

    def query(self) -> bool:
        return Event.records - self._at >= 3

    def synchronize(self) -> None:
        Event.records += 3


def test_a_thousand_steps_use_the_memory_of_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, pinned = torch.empty, []

    def empty(shape: tuple[int, ...], dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        pinned.append(shape)
        return plain(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    readings, waiting, rng = Readings(cuda=True), deque[tuple[float, Any]](), random.Random(0)
    for step in range(1000):
        for kind in (torch.float32, torch.bfloat16):
            value = torch.tensor([float(step)], dtype=kind, requires_grad=True).as_subclass(OnDevice)
            waiting.append((float(value.item()), readings.later(value)))
            with torch.no_grad():
                value.fill_(-1.0)  # as the next replay does
        readings.later(value)  # is never read
        while waiting and (waiting[0][1].ready() or rng.random() < 0.2):
            wanted, copy = waiting.popleft()
            assert copy.read() == wanted
    assert len(pinned) - 1000 <= 10 and Event.made <= len(pinned)


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
    """Of three ranks, the first or the last one writes. The run may be longer than what may wait for metrics."""
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
        attempt.metrics.touch()  # by another rank
    for step in range(lines.last):
        for metric in ("loss", "grad_norm") if number else ():
            lines.log.add(metric, "printed", step, Known(1.0))
        lines.end_step(Moment(float(step), None, (0, 0, 0)), "measure")
        complete = lines.write(0)
    assert complete and lines.ended == lines.last
    assert len(tried) == (number == 2), "each attempt costs a visit of the file system"
    assert lines.is_writer == (number == 0 or writes)
    if lines._file:
        lines._file.__exit__()
