"""Profile a few steps after the timed ones.

Tracing disturbs replay, so the duration of a graphed step is not measured here, and the upper bound of its speed-up comes from
its eager baseline. The graphed run's own kernel times show what communicating ranks wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from launch.common.merged_duration import merged_duration
from launch.contract.records.probe import HOST_STEPS, WAITS, Launches, Probe, Probed
from launch.train.telemetry.kernel_times import kernels_of

COMMUNICATION = "nccl"
"""The names of kernels that move data between ranks contain this."""


def probe(step: Callable[[torch.Tensor], object], batches: Sequence[torch.Tensor]) -> Probed:
    """Run ``step`` on ``PROBED_STEPS`` batches on a CUDA device. All ranks must call this together."""
    host = [_host_milliseconds(step, batch) for batch in batches[:HOST_STEPS]]
    events = trace(lambda: [step(batch) for batch in batches[HOST_STEPS:]])
    waits = host_syncs(calls_of(events))
    return summarise(events, len(batches) - HOST_STEPS, None if waits else sorted(host)[len(host) // 2])


def trace(work: Callable[[], object]) -> Sequence[Any]:
    """Run ``work`` and return the profiler's events: driver calls and device work."""
    with _profile_gpu() as profiler:
        work()
        torch.cuda.synchronize()
    return _events(profiler)


class StepsTrace:
    """A trace of steps that the caller runs, from the construction of this object to its end."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._running = ExitStack()
        self._profiler = self._running.enter_context(_profile_gpu())

    def end(self, steps: int) -> Probed:
        """End the trace and return the findings over ``steps`` steps. The host's time is unknown."""
        return summarise(self.end_events(), steps, None)

    def end_events(self) -> Sequence[Any]:
        """End the trace and return the profiler's events."""
        torch.cuda.synchronize()
        self._running.close()
        return _events(self._profiler)


def _profile_gpu() -> Any:
    """Return the context that ``torch.profiler.profile`` wraps. The wrapper imports Inductor, which takes seconds."""
    return profile(use_cpu=False, use_device="cuda", use_kineto=True)


def _events(profiler: Any) -> Sequence[Any]:
    events: Sequence[Any] = profiler.kineto_results.events()
    return events


def is_kernel(event: Any) -> bool:
    """Return whether an event is a kernel, not a copy or a fill."""
    return event.device_type() == DeviceType.CUDA and not event.name().startswith(("Memcpy", "Memset"))


def calls_of(events: Iterable[Any]) -> list[tuple[int, str]]:
    """Return the (start in nanoseconds, name) of each driver call."""
    return [(event.start_ns(), event.name()) for event in events if event.device_type() != DeviceType.CUDA]


def launch_calls(events: Iterable[Any]) -> dict[int, tuple[int, str]]:
    """Return the (start in nanoseconds, name) of each call that launches kernels, by the id that its kernels share."""
    calls = (event for event in events if event.device_type() != DeviceType.CUDA and "Launch" in event.name())
    return {event.correlation_id(): (event.start_ns(), event.name()) for event in calls}


def launches_of(events: Sequence[Any], steps: int) -> Launches:
    """Return how the host launched the kernels of ``steps`` traced steps."""
    calls = launch_calls(events)
    callers = [calls.get(event.correlation_id(), (0, ""))[1] for event in events if is_kernel(event)]
    by_graphs, unknown = sum("GraphLaunch" in name for name in callers), callers.count("")
    return Launches(by_graphs / steps, (len(callers) - by_graphs - unknown) / steps, unknown / steps)


def host_syncs(calls: Iterable[tuple[int, str]]) -> int:
    """Count the waiting calls between the first and the last launch. Calls outside are the profiler's own."""
    names = [name for _, name in sorted(calls)]
    launches = [place for place, name in enumerate(names) if "Launch" in name]
    return sum(name in WAITS for name in names[launches[0] : launches[-1]]) if launches else 0


def _host_milliseconds(step: Callable[[torch.Tensor], object], batch: torch.Tensor) -> float:
    """Return the time that the host needs to enqueue a step onto an idle device, including any wait within the step."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step(batch)
    taken = (time.perf_counter() - begun) * 1e3
    torch.cuda.synchronize()
    return taken


def summarise(events: Sequence[Any], steps: int, host_ms: float | None) -> Probed:
    """Return the means over ``steps`` traced steps. ``host_ms`` is the host's time to enqueue one, if it is known."""
    launches = 0
    kernels: list[tuple[str, int]] = []
    computing: list[tuple[int, int]] = []
    communicating: list[tuple[int, int]] = []
    for event in events:
        name = event.name()
        if event.device_type() == DeviceType.CUDA:
            interval = (event.start_ns(), event.start_ns() + event.duration_ns())
            (communicating if COMMUNICATION in name.lower() else computing).append(interval)
            if is_kernel(event):
                kernels.append((name, event.duration_ns()))
        elif name.startswith("cudaGraphLaunch"):
            launches += 1
    found = Probe(
        graph_launches=launches / steps,
        kernels=len(kernels) / steps,
        busy_ms=merged_duration(chain(computing, communicating)) / steps / 1e6,
        computing_ms=merged_duration(computing) / steps / 1e6,
        host_ms=host_ms,
        waits=host_syncs(calls_of(events)) / steps,
    )
    return Probed(found, kernels_of(kernels, steps), launches_of(events, steps))
