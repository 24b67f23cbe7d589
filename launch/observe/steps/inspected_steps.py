"""Inspect the steps of a user's program after the timed ones, for ``advise``, on a GPU.

The first steps time the host, without the profiler. The others run under the profiler, with PyTorch's synchronization warnings.
Nothing of this is timed, and none of it changes what the program computes. Operators, shapes and random generators would need a
dispatch mode around the program's own code, so they are not inspected.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

import torch

from launch.contract.records.inspection import OF_PROGRAMS, Inspection
from launch.contract.records.probe import HOST_STEPS, TRACED_STEPS
from launch.train.inspection.capture_blockers import collect_waits, compiled_functions, findings_of
from launch.train.inspection.dispatch_trace import CaptureBlocker
from launch.train.inspection.source_line import NOWHERE, current_program_line
from launch.train.telemetry.event_log import Recorder
from launch.train.telemetry.kernel_times import kernels_of
from launch.train.telemetry.profiler import StepsTrace, calls_of, host_syncs, is_kernel, summarise

_GRID = re.compile(r'"grid": *\[([^\]]*)\]')
"""The numbers of blocks of a kernel, in the profiler's metadata."""


class InspectedSteps:
    """The steps from the construction of this object to the end of the last traced one, when it writes its records."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._host_ms: list[float] = []
        self._trace: StepsTrace | None = None
        self._watching = ExitStack()
        self._waited: list[CaptureBlocker] = []
        self._ends: list[int] = []
        """When the host ended each traced step, in nanoseconds since 1970, as the profiler counts."""
        self._begin_host_step()

    def end_step(self) -> None:
        if self._trace is not None:
            self._ends.append(time.time_ns())
            if len(self._ends) == TRACED_STEPS:
                self._end(self._trace)
        elif len(self._host_ms) < HOST_STEPS:
            self._host_ms.append((time.perf_counter() - self._begun) * 1e3)
            if len(self._host_ms) == HOST_STEPS:
                self._begin_trace()
            else:
                self._begin_host_step()

    def _begin_host_step(self) -> None:
        torch.cuda.synchronize()
        self._begun = time.perf_counter()

    def _begin_trace(self) -> None:
        self._allocations, self._compiled = _driver_allocations(), compiled_functions()
        self._trace = StepsTrace()
        self._watching.enter_context(collect_waits(self._waited, current_program_line))

    def _end(self, trace: StepsTrace) -> None:
        self._watching.close()
        self._trace = None
        allocations, compiled = _driver_allocations() - self._allocations, compiled_functions() - self._compiled
        events, steps = trace.end_events(), len(self._ends)
        waits, launched = host_syncs(calls_of(events)), launched_by_step(events, self._ends)
        found = [*self._waited, *changed_kernels(launched), *[CaptureBlocker("allocation", NOWHERE)] * allocations]
        ran = [(event.name(), event.duration_ns()) for event in events if is_kernel(event)]
        inspection = Inspection(
            tuple(findings_of(found, steps)),
            kernels_of(ran, steps),
            waits / steps,
            compiled,
            tuple(kind for kind in OF_PROGRAMS if launched or kind != "kernels"),
        )
        self._recorder.write("probe", **vars(summarise(events, steps, None if waits else median(self._host_ms))))
        self._recorder.write("inspection", inspection=inspection)


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
    kernels = [event for event in events if is_kernel(event)]
    own = set(map(id, kernels))
    calls = {
        event.correlation_id(): event.start_ns()
        for event in events
        if id(event) not in own and "Launch" in event.name()
    }
    steps: list[list[Launch]] = [[] for _ in ends]
    if any(event.correlation_id() not in calls for event in kernels):
        return []
    for event in sorted(kernels, key=lambda event: calls[event.correlation_id()]):
        step = bisect_left(ends, calls[event.correlation_id()])
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
