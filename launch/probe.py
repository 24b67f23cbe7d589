"""What a step does on the device, seen by the profiler: some steps after the last that was timed.

Tracing disturbs replay, so that no time of a graphed step is read here: what a graphed run can reach is the busy time of
its eager twin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from launch.record import Probe

HOST_STEPS = 3
"""Steps of which the host's time is taken, without the profiler."""
TRACED_STEPS = 3
COMMUNICATION = "nccl"
"""In the names of kernels that move data between ranks."""


def probe(step: Callable[[int], object], first: int) -> Probe:
    """Run a few steps from number ``first`` on; a collective call of all ranks, on CUDA."""
    numbers = iter(range(first, first + HOST_STEPS + TRACED_STEPS))
    host = [_host_milliseconds(step, next(numbers)) for _ in range(HOST_STEPS)]
    events = trace(lambda: [step(number) for number in numbers])
    return _summed_up(events, TRACED_STEPS, sorted(host)[len(host) // 2])


def trace(work: Callable[[], object]) -> Sequence[Any]:
    """What the driver was called for during ``work`` and what the device did, as the profiler's events."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events: Sequence[Any] = profiler.profiler.kineto_results.events()
    return events


def is_kernel(event: Any) -> bool:
    """Whether one of the events of a trace is a kernel: no copy, no filling of memory."""
    return event.device_type() == DeviceType.CUDA and not event.name().startswith(("Memcpy", "Memset"))


def _host_milliseconds(step: Callable[[int], object], number: int) -> float:
    """How long the host takes to enqueue a step onto an idle device."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step(number)
    taken = (time.perf_counter() - begun) * 1e3
    torch.cuda.synchronize()
    return taken


def _summed_up(events: Iterable[Any], steps: int, host_ms: float) -> Probe:
    launches = kernels = 0
    computing: list[tuple[int, int]] = []
    communicating: list[tuple[int, int]] = []
    for event in events:
        name = event.name()
        if event.device_type() == DeviceType.CUDA:
            interval = (event.start_ns(), event.start_ns() + event.duration_ns())
            (communicating if COMMUNICATION in name.lower() else computing).append(interval)
            kernels += is_kernel(event)
        elif name.startswith("cudaGraphLaunch"):
            launches += 1
    return Probe(
        graph_launches=launches / steps,
        kernels=kernels / steps,
        busy_ms=union(chain(computing, communicating)) / steps / 1e6,
        computing_ms=union(computing) / steps / 1e6,
        host_ms=host_ms,
    )


def union(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union of ``intervals``, each from its first to its second number."""
    covered = end = 0
    for begins, ends in sorted(intervals):
        covered += max(0, ends - max(begins, end))
        end = max(end, ends)
    return covered
