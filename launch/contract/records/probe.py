"""The profiler's view of a few steps after the timed ones."""

from __future__ import annotations

from dataclasses import dataclass

from launch.common.typed_json import Amount


@dataclass(frozen=True)
class Probe:
    """Means per step that the profiler saw on one rank, over a few steps after the timed ones.

    ``busy_ms`` is the union of the intervals in which the device worked. ``computing_ms`` leaves out kernels that communicate,
    which also wait. ``host_ms`` is the time the host needs to enqueue a step onto an idle device, without the profiler. It is
    None if the host waits for the device within a step.
    """

    graph_launches: Amount
    kernels: Amount
    busy_ms: Amount
    computing_ms: Amount
    host_ms: Amount | None


@dataclass(frozen=True)
class LastStep:
    """The last traced step on one rank's device, which tracing may have lengthened.

    It begins where the device ended the step before. ``busy`` has the share of each of its equal parts in which the device
    worked, from 0 to 1.
    """

    milliseconds: Amount
    busy: tuple[Amount, ...]


@dataclass(frozen=True)
class Probed:
    """What a probe found. The last step is None where the traced steps differ in their work."""

    probe: Probe
    last_step: LastStep | None = None
