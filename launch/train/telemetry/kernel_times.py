"""Summarise the kernels of traced steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from launch.contract.records.kernels import BOUNDS_US, Kernels, KernelTime

MOST_KERNELS = 8
LONGEST_NAME = 120
"""The number of characters kept of a kernel's name. Names of C++ templates have thousands."""


def kernels_of(ran: Sequence[tuple[str, int]], steps: int) -> Kernels:
    """Summarise the (name, nanoseconds) of each kernel of ``steps`` steps."""
    lengths = np.array([nanoseconds for _, nanoseconds in ran]) / 1e3
    histogram = np.bincount(np.searchsorted(BOUNDS_US, lengths, side="right"), minlength=len(BOUNDS_US) + 1)
    counts, totals = Counter(name for name, _ in ran), Counter[str]()
    for name, nanoseconds in ran:
        totals[name] += nanoseconds
    longest = sorted(totals.items(), key=lambda item: (-item[1], item[0]))[:MOST_KERNELS]
    return Kernels(
        tuple((histogram / steps).tolist()),
        float(np.median(lengths)) if len(lengths) else 0.0,
        tuple(KernelTime(name[:LONGEST_NAME], counts[name] / steps, total / steps / 1e6) for name, total in longest),
    )
