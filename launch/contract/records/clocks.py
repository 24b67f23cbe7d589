"""Clocks of a GPU over a phase."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

ClockReason = Literal["power_cap", "thermal", "sync_boost", "hardware_slowdown", "hardware_thermal", "power_brake"]
"""What lowers the clocks of a GPU. An idle GPU and clocks that somebody has set are no throttling and have no name."""
CLOCK_REASONS: tuple[ClockReason, ...] = get_args(ClockReason)


@dataclass(frozen=True)
class Clocks:
    """What a GPU's driver says of its clocks over ``seconds``, a phase.

    ``throttled`` holds the seconds for which each reason that the driver counts lowered them. ``active`` are the reasons at
    work at the phase's beginning or end, None where it does not say; ``power_limits`` the limits in force then, in watts.
    Clocks are of the multiprocessors, at its end.
    """

    seconds: float
    throttled: Mapping[ClockReason, float]
    active: tuple[ClockReason, ...] | None = None
    power_limits: tuple[float, ...] = ()
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None


def clocks_from_json(content: Mapping[str, Any]) -> Clocks:
    """Raises TypeError or ValueError where a figure is no number from 0 on, a reason is none, or a field is unknown."""
    active = content["active"]
    clocks = Clocks(
        **dict(content)
        | {"active": None if active is None else tuple(active), "power_limits": tuple(content["power_limits"])}
    )
    speeds = [value for value in (clocks.sm_mhz, clocks.max_sm_mhz) if value is not None]
    for value in (clocks.seconds, *clocks.throttled.values(), *clocks.power_limits, *speeds):
        if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{value!r} is no number from 0 on")
    if strange := {*clocks.throttled, *(clocks.active or ())} - {*CLOCK_REASONS}:
        raise ValueError(f"{sorted(map(str, strange))} are no reasons for lower clocks")
    return clocks
