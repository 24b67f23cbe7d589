"""The profiler's view of a few steps after the timed ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.common.atomic_files import amount


@dataclass(frozen=True)
class Probe:
    """Means per step that the profiler saw on one rank, over a few steps after the timed ones.

    ``busy_ms`` is the union of the intervals in which the device worked. ``computing_ms`` leaves out kernels that communicate,
    which also wait. ``host_ms`` is the time the host needs to enqueue a step onto an idle device, without the profiler. It is
    None if the host waits for the device within a step.
    """

    graph_launches: float
    kernels: float
    busy_ms: float
    computing_ms: float
    host_ms: float | None


def probe_from_json(content: Mapping[str, Any]) -> Probe:
    """Read a probe from an event.

    Raises:
        TypeError, ValueError: a figure is not a number of at least 0, or a field is missing or unknown.
    """
    for name, value in content.items():
        if (name, value) != ("host_ms", None):
            amount(value, name)
    return Probe(**content)
