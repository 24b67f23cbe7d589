"""Sketches of tensors: a norm and a few sums of each. Runs compare gradients and parameters by them, without storing any.

Losses hardly depend on some parameters, so curves do not show that a replay computes a wrong gradient of one.
launch/train/telemetry/parameter_digest.py computes sketches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.common.typed_json import Amount, Count

SUMS = 17
"""The number of sums. Sizes of layers are no multiples of it, so a column of a matrix spreads over all sums."""


@dataclass(frozen=True)
class Sketch:
    """One rank's part of a tensor. Each element, with a random sign that is the same in every run, counts for one of the ``sums``."""

    name: str
    norm: Amount
    sums: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sums) != SUMS:
            raise ValueError(f"{self.name} has {len(self.sums)} sums, not {SUMS}")

    def distance(self, other: Sketch) -> float:
        """Return an estimate of the norm of the difference of two tensors."""
        return math.dist(self.sums, other.sums)

    def differs_by_rounding(self, other: Sketch) -> bool:
        """Return whether few sums differ, each as if one element were its neighbour in bf16.

        Few are two, or a quarter of those with an element; the others are 0. Neighbours differ by a power of two. It is at most
        1/128 of the larger one, and thus of the norm.
        """
        pairs = [pair for pair in zip(self.sums, other.sums, strict=True) if any(pair)]
        differences = [own - its for own, its in pairs if own != its]
        largest = math.hypot(*self.sums) / 128
        is_step = all(abs(math.frexp(one)[0]) == 0.5 and abs(one) <= largest for one in differences)
        return is_step and len(differences) <= max(2, len(pairs) // 4)


@dataclass(frozen=True)
class StepSketch:
    """The gradients that one optimizer used in a step."""

    step: Count
    gradients: tuple[Sketch, ...]


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor of floats. ``last`` sketches its last value, and ``change`` estimates the norm of its change since the capture."""

    last: Sketch
    change: Amount
