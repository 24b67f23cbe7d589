"""Memory of a rank at the end of a phase."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes at a phase's end. Peaks are over the phase. On a CPU the device figures are None, on a GPU none is.

    ``device_outside`` is what the driver counts as used on the device beyond the allocator's reservation.
    """

    host_rss: int
    host_peak_rss: int
    allocated: int | None = None
    peak_allocated: int | None = None
    reserved: int | None = None
    peak_reserved: int | None = None
    graph_pool: int | None = None
    device_outside: int | None = None
