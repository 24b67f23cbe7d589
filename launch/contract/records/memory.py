"""Memory of a rank at the end of a phase, and what an allocation lacked."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MOST_AT_START = 4 * 2**30
"""More than an engine holds outside its allocator before it has a model: a context and communicators, 1.2 GiB on H200s."""
CONTEXT = 2**30
"""About what a rank holds outside its allocator before it has a model."""


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


def foreign_bytes(at_start: Memory) -> int:
    """Return about how much of its GPU other processes held, from a rank's memory before it has a model; 0 if it is alone."""
    outside = at_start.device_outside or 0
    return outside - CONTEXT if outside > MOST_AT_START else 0


def requested_bytes(message: str) -> int:
    """Return the size of the allocation that failed with PyTorch's ``message``, at least 1."""
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)", message)
    return max(int(float(found[1]) * _UNITS[found[2]]), 1) if found else 1
