"""A GPU's clocks over a phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launch.common.typed_json import Amount, Count

ClockReason = Literal["power_cap", "thermal", "sync_boost", "hardware_slowdown", "hardware_thermal", "power_brake"]
"""Reasons for lowered clocks. An idle GPU and clocks that somebody set are not throttling."""


@dataclass(frozen=True)
class Clocks:
    """A GPU's clocks over a phase of ``seconds``, as its driver reports them.

    ``throttled`` has the seconds of each reason that the driver counts. ``active`` has the reasons active at the
    phase's start or end, None if unknown. ``power_limits`` has the limits at these two times, in watts. ``sm_mhz`` is
    the SM clock at the end.
    """

    seconds: Amount
    throttled: Mapping[ClockReason, Amount]
    active: tuple[ClockReason, ...] | None = None
    power_limits: tuple[Amount, ...] = ()
    sm_mhz: Count | None = None
    max_sm_mhz: Count | None = None
