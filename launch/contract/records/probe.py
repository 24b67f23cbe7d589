"""The profiler's view of a few steps after the timed ones."""

from __future__ import annotations

from dataclasses import dataclass

from launch.common.typed_json import Amount
from launch.contract.records.kernels import Kernels

HOST_STEPS = 3
"""The number of steps in which the host's time is measured, without the profiler."""
TRACED_STEPS = 3
PROBED_STEPS = HOST_STEPS + TRACED_STEPS
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""The calls in which the host waits for the device."""


@dataclass(frozen=True)
class Probe:
    """Means per step that the profiler saw on one rank, over a few steps after the timed ones.

    ``busy_ms`` is the time in which the device worked (the union of all kernels' intervals). ``computing_ms`` leaves out
    communication kernels, because they also wait. ``host_ms`` is the time that the host needs to enqueue a step, measured
    without the profiler on an idle device. It is None if the host waits for the device within a step.
    """

    graph_launches: Amount
    kernels: Amount
    busy_ms: Amount
    computing_ms: Amount
    host_ms: Amount | None
    waits: Amount | None = None
    """How often the host waits for the device between the first and the last launch."""


@dataclass(frozen=True)
class Launches:
    """How the host launched the kernels of a traced step. Means per step. ``unknown`` are kernels whose launch was not traced."""

    by_graphs: Amount
    one_by_one: Amount
    unknown: Amount

    @property
    def kernels(self) -> float:
        return self.by_graphs + self.one_by_one + self.unknown

    @property
    def mostly_one_by_one(self) -> bool:
        return self.one_by_one > self.kernels / 2


@dataclass(frozen=True)
class Probed:
    """What a probe found."""

    probe: Probe
    kernels: Kernels
    launches: Launches
