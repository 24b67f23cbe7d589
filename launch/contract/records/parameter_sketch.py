"""Sketches of parameters after the last step: a few sums of each. Runs compare their parameters by them, without storing any.

Losses hardly depend on some parameters, so curves do not show that a replay computes a wrong gradient of one.
launch/train/telemetry/parameter_digest.py computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.common.typed_json import Amount

SUMS = 17
"""The number of sums. Sizes of layers are no multiples of it, so a column of a matrix spreads over all sums."""


@dataclass(frozen=True)
class ParameterSketch:
    """One parameter on one rank. Each element, with a random sign that is the same in every run, counts for one of the ``sums``.

    ``change`` estimates the norm of the parameter's change since the capture.
    """

    name: str
    change: Amount
    sums: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sums) != SUMS:
            raise ValueError(f"{self.name} has {len(self.sums)} sums, not {SUMS}")

    def distance(self, other: ParameterSketch) -> float:
        """Return an estimate of the norm of the difference of two parameters."""
        return math.dist(self.sums, other.sums)

    def differs_by_rounding(self, other: ParameterSketch) -> bool:
        """Return whether few sums differ, each as if one element were its neighbour in bf16.

        Few are two, or a quarter of those with an element; the others are 0. Neighbours differ by a power of two. It is at most
        1/128 of the larger one, and thus of the norm.
        """
        pairs = [pair for pair in zip(self.sums, other.sums, strict=True) if any(pair)]
        differences = [own - its for own, its in pairs if own != its]
        largest = math.hypot(*self.sums) / 128
        is_step = all(abs(math.frexp(one)[0]) == 0.5 and abs(one) <= largest for one in differences)
        return is_step and len(differences) <= max(2, len(pairs) // 4)
