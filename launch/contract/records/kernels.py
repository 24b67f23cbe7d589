"""The kernels of a step, by duration and by name."""

from __future__ import annotations

from dataclasses import dataclass

from launch.common.typed_json import Amount

BOUNDS_US = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
"""Upper bounds of the duration histogram's bins, in microseconds."""


@dataclass(frozen=True)
class KernelTime:
    """All kernels of one name: their number and their total milliseconds per step."""

    name: str
    count: Amount
    milliseconds: Amount


@dataclass(frozen=True)
class Kernels:
    """The kernels of a step by duration.

    ``counts[i]`` kernels take less than ``BOUNDS_US[i]`` and at least the bound before it. The last count has the rest.
    ``longest`` has the kernel names with the largest total time.
    """

    counts: tuple[Amount, ...]
    median_us: Amount
    longest: tuple[KernelTime, ...]

    def __post_init__(self) -> None:
        if len(self.counts) != len(BOUNDS_US) + 1:
            raise ValueError(
                f"kernels are counted in {len(self.counts)} classes of duration, not in {len(BOUNDS_US) + 1}"
            )

    @property
    def number(self) -> float:
        return sum(self.counts)

    def share_below(self, bound_us: float) -> float:
        """Return the share of kernels below ``bound_us``, one of ``BOUNDS_US``; 0 without kernels."""
        return sum(self.counts[: BOUNDS_US.index(bound_us) + 1]) / self.number if self.number else 0.0
