"""Memory of a rank at the end of a phase."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes at the end of a phase. Peaks cover the phase. Device figures are None only on a CPU.

    ``device_outside`` is the used device memory that the allocator did not reserve, as the driver counts it.
    """

    host_rss: int
    host_peak_rss: int
    allocated: int | None = None
    peak_allocated: int | None = None
    reserved: int | None = None
    peak_reserved: int | None = None
    graph_pool: int | None = None
    device_outside: int | None = None
