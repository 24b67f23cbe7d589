"""What a step does on the device, seen by the profiler: some steps after the last that was timed.

Tracing disturbs replay, so that how long a graphed step takes is not read here, and its limit is its eager twin's; what its
own kernels take tells what ranks that communicate wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from launch.contract.records.probe import Probe

HOST_STEPS = 3
"""Steps of which the host's time is taken, without the profiler."""
TRACED_STEPS = 3
PROBED_STEPS = HOST_STEPS + TRACED_STEPS
COMMUNICATION = "nccl"
"""In the names of kernels that move data between ranks."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def probe(step: Callable[[torch.Tensor], object], batches: Sequence[torch.Tensor]) -> Probe:
    """Run ``step`` on each of ``batches``, ``PROBED_STEPS`` of them, which are on the device; a collective call of all ranks,
    on CUDA."""
    host = [_host_milliseconds(step, batch) for batch in batches[:HOST_STEPS]]
    events = trace(lambda: [step(batch) for batch in batches[HOST_STEPS:]])
    waits = host_syncs(calls_of(events))
    return _summed_up(events, len(batches) - HOST_STEPS, None if waits else sorted(host)[len(host) // 2])


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


def calls_of(events: Iterable[Any]) -> list[tuple[int, str]]:
    """What the driver was called for in a trace: when each call began, in nanoseconds, and its name."""
    return [(event.start_ns(), event.name()) for event in events if event.device_type() != DeviceType.CUDA]


def host_syncs(calls: Iterable[tuple[int, str]]) -> int:
    """How often the driver was asked to wait, by its (start, name) calls, between the first launch and the last: before and
    after them it is the profiler that waits."""
    names = [name for _, name in sorted(calls)]
    launches = [place for place, name in enumerate(names) if "Launch" in name]
    return sum(name in WAITS for name in names[launches[0] : launches[-1]]) if launches else 0


def _host_milliseconds(step: Callable[[torch.Tensor], object], batch: torch.Tensor) -> float:
    """How long the host takes to enqueue a step onto an idle device. Where it waits in the step, that is the step's own
    time."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step(batch)
    taken = (time.perf_counter() - begun) * 1e3
    torch.cuda.synchronize()
    return taken


def _summed_up(events: Iterable[Any], steps: int, host_ms: float | None) -> Probe:
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
        busy_ms=merged_duration(chain(computing, communicating)) / steps / 1e6,
        computing_ms=merged_duration(computing) / steps / 1e6,
        host_ms=host_ms,
    )


def merged_duration(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union of ``intervals``, each from its first to its second number."""
    covered = end = 0
    for begins, ends in sorted(intervals):
        covered += max(0, ends - max(begins, end))
        end = max(end, ends)
    return covered
