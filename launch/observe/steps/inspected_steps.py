"""Inspect the steps of a user's program after the timed ones, for ``advise``.

On a GPU, the first steps time the host, without the profiler. The next ones run under the profiler, with PyTorch's
synchronization warnings. The last ones, on any device, run under a dispatch mode that records their operators. It is active
from the end of one step to the end of the next. Nothing of this is timed, and none of it changes what the program computes.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from launch.contract.records.inspection import INSPECTED_STEPS, OF_OPERATORS, OF_TRACES, Inspection
from launch.contract.records.probe import HOST_STEPS, TRACED_STEPS
from launch.contract.spec import Device
from launch.train.inspection.capture_blockers import collect_waits, compiled_functions
from launch.train.inspection.dispatch_trace import CaptureBlocker, Operators
from launch.train.inspection.source_line import NOWHERE, current_program_line
from launch.train.inspection.step_operators import StepOperators, findings_of
from launch.train.telemetry.event_log import Recorder
from launch.train.telemetry.kernel_times import kernels_of
from launch.train.telemetry.profiler import StepsTrace, calls_of, host_syncs, is_kernel, launch_calls, summarise

_GRID = re.compile(r'"grid": *\[([^\]]*)\]')
"""The numbers of blocks of a kernel, in the profiler's metadata."""


class InspectedSteps:
    """The steps from the construction of this object to the end of the last inspected one, when it writes its record."""

    def __init__(self, recorder: Recorder, device: Device) -> None:
        self._recorder = recorder
        self._host_ms: list[float] = []
        self._watching = ExitStack()
        self._waited: list[CaptureBlocker] = []
        self._ends: list[int] = []
        """When the host ended each traced step, in nanoseconds since 1970, as the profiler counts."""
        self._traced = Inspection((), sought=())
        """What the trace showed."""
        self._modes: list[Operators] = []
        """The modes that record operators, one for each step."""
        if device == "cuda":
            self._begin_host_step()
        else:
            self._begin_operators(torch.device("cpu"))

    def end_step(self) -> None:
        self._end_step()

    def _begin_host_step(self) -> None:
        self._end_step: Callable[[], None] = self._end_host_step
        torch.cuda.synchronize()
        self._begun = time.perf_counter()

    def _end_host_step(self) -> None:
        self._host_ms.append((time.perf_counter() - self._begun) * 1e3)
        if len(self._host_ms) < HOST_STEPS:
            self._begin_host_step()
        else:
            self._begin_trace()

    def _begin_trace(self) -> None:
        self._end_step = self._end_traced_step
        self._allocations, self._compiled = _driver_allocations(), compiled_functions()
        self._trace = StepsTrace()
        self._watching.enter_context(collect_waits(self._waited, current_program_line))

    def _end_traced_step(self) -> None:
        self._ends.append(time.time_ns())
        if len(self._ends) < TRACED_STEPS:
            return
        self._watching.close()
        allocations, compiled = _driver_allocations() - self._allocations, compiled_functions() - self._compiled
        events, steps = self._trace.end_events(), len(self._ends)
        waits, launched = host_syncs(calls_of(events)), launched_by_step(events, self._ends)
        found = [*self._waited, *changed_kernels(launched), *[CaptureBlocker("allocation", NOWHERE)] * allocations]
        ran = [(event.name(), event.duration_ns()) for event in events if is_kernel(event)]
        self._traced = Inspection(
            tuple(findings_of(found, steps)),
            kernels_of(ran, steps),
            waits / steps,
            compiled,
            tuple(kind for kind in OF_TRACES if launched or kind != "kernels"),
        )
        self._recorder.write("probe", **vars(summarise(events, steps, None if waits else median(self._host_ms))))
        self._begin_operators(torch.device("cuda", torch.cuda.current_device()))

    def _begin_operators(self, device: torch.device) -> None:
        self._end_step = self._end_operators
        self._operators = StepOperators(device, current_program_line)
        self._begin_mode()

    def _begin_mode(self) -> None:
        self._modes.append(self._operators.begin())
        self._modes[-1].__enter__()  # type: ignore[no-untyped-call]

    def _end_operators(self) -> None:
        seen = self._modes[-1].stop()
        if seen and len(self._modes) < INSPECTED_STEPS:
            self._begin_mode()
            return
        self._end_step = lambda: None
        found = self._operators.findings() if seen else []
        self._recorder.write("inspection", inspection=replace(
            self._traced,
            findings=(*self._traced.findings, *found),
            sought=(*self._traced.sought, *(OF_OPERATORS if seen else ())),
        ))  # fmt: skip


def _driver_allocations() -> int:
    """Return how often PyTorch's allocator has taken memory from the driver."""
    return int(torch.cuda.memory_stats()["num_device_alloc"])


class Launch(NamedTuple):
    """A kernel and its numbers of blocks, as text; empty where the profiler does not give them."""

    kernel: str
    grid: str


def launched_by_step(events: Sequence[Any], ends: Sequence[int]) -> list[list[Launch]]:
    """Return the kernels that the host launched in each step, in its order. ``ends`` are the steps' ends in nanoseconds.

    Return an empty list if the steps are unknown: a kernel's launch was not traced, or a step has none, as if clocks differed.
    """
    kernels, calls = [event for event in events if is_kernel(event)], launch_calls(events)
    steps: list[list[Launch]] = [[] for _ in ends]
    if any(event.correlation_id() not in calls for event in kernels):
        return []
    for event in sorted(kernels, key=lambda event: calls[event.correlation_id()][0]):
        step = bisect_left(ends, calls[event.correlation_id()][0])
        if step < len(steps):
            steps[step].append(Launch(event.name(), _grid(event)))
    return steps if all(steps) else []


def _grid(event: Any) -> str:
    # Old releases of PyTorch do not give a kernel's metadata.
    found = _GRID.search(event.metadata_json()) if hasattr(event, "metadata_json") else None
    return found[1].replace(" ", "") if found else ""


def changed_kernels(steps: Sequence[Sequence[Launch]]) -> list[CaptureBlocker]:
    """Return the first difference of each later step from the first one."""
    return [
        CaptureBlocker("kernels", NOWHERE, _difference(steps[0], later)) for later in steps[1:] if later != steps[0]
    ]


def _difference(first: Sequence[Launch], later: Sequence[Launch]) -> str:
    if len(first) != len(later):
        return f"{len(first)} kernels in one step, {len(later)} in another"
    one, other = next((one, other) for one, other in zip(first, later, strict=True) if one != other)
    if one.kernel != other.kernel:
        return f"{_short(one.kernel)} in one step, {_short(other.kernel)} in another"
    return f"{_short(one.kernel)} has {one.grid} blocks in one step, {other.grid} in another"


def _short(kernel: str) -> str:
    return kernel if len(kernel) <= 60 else f"{kernel[:60]}..."
