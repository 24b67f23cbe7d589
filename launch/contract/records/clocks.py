"""A GPU's clocks over a phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from launch.common.atomic_files import amount

ClockReason = Literal["power_cap", "thermal", "sync_boost", "hardware_slowdown", "hardware_thermal", "power_brake"]
"""Reasons for lowered clocks. An idle GPU and clocks that somebody set are not throttling."""
CLOCK_REASONS: tuple[ClockReason, ...] = get_args(ClockReason)


@dataclass(frozen=True)
class Clocks:
    """A GPU's clocks over a phase of ``seconds``, as its driver reports them.

    ``throttled`` maps each reason that the driver counts to seconds. ``active`` holds the reasons active at the phase's start
    or end, None if unknown; ``power_limits`` the limits then, in watts. Clocks are the SM clocks at its end.
    """

    seconds: float
    throttled: Mapping[ClockReason, float]
    active: tuple[ClockReason, ...] | None = None
    power_limits: tuple[float, ...] = ()
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None


def clocks_from_json(content: Mapping[str, Any]) -> Clocks:
    """Read clocks from a phase's event.

    Raises:
        TypeError, ValueError: a figure is not a number of at least 0, or a reason or field is unknown.
    """
    active = content["active"]
    clocks = Clocks(
        **dict(content)
        | {"active": None if active is None else tuple(active), "power_limits": tuple(content["power_limits"])}
    )
    speeds = [value for value in (clocks.sm_mhz, clocks.max_sm_mhz) if value is not None]
    for value in (clocks.seconds, *clocks.throttled.values(), *clocks.power_limits, *speeds):
        amount(value)
    if strange := {*clocks.throttled, *(clocks.active or ())} - {*CLOCK_REASONS}:
        raise ValueError(f"{sorted(map(str, strange))} are not reasons for lowered clocks")
    return clocks
