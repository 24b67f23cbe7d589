"""What the profiler saw of some steps after the timed ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Probe:
    """What the profiler saw of some steps after the timed ones, on one rank; means over those steps.

    ``busy_ms`` is the union of the intervals in which the device worked, ``computing_ms`` that without the kernels that
    communicate, which also wait. ``host_ms`` is what the host took to enqueue a step onto an idle device, without the
    profiler; None where it waits for the device in a step, so that its time would be the device's.
    """

    graph_launches: float
    kernels: float
    busy_ms: float
    computing_ms: float
    host_ms: float | None


def probe_from_json(content: Mapping[str, Any]) -> Probe:
    """Raises TypeError or ValueError where a figure is no number from 0 on, or a field is missing or unknown."""
    for name, value in content.items():
        if name == "host_ms" and value is None:
            continue
        if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} is {value!r}, not a number from 0 on")
    return Probe(**content)
