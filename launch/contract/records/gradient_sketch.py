"""Sketches of gradients: a norm and a few random projections. Two runs compare gradients by them, without storing gradients.

launch/observe/state/gradient_sketches.py computes them in the first steps of a user's program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.common.typed_json import Amount, Count

PROJECTIONS = 4


@dataclass(frozen=True)
class GradientSketch:
    """One parameter's gradient on one rank. A projection sums its elements with random signs that are the same in every run."""

    name: str
    norm: Amount
    projections: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.projections) != PROJECTIONS:
            raise ValueError(f"{self.name} has {len(self.projections)} projections, not {PROJECTIONS}")

    def distance(self, other: GradientSketch) -> float:
        """Return an estimate of the norm of the difference of two gradients."""
        differences = (one - two for one, two in zip(self.projections, other.projections, strict=True))
        return math.sqrt(sum(difference**2 for difference in differences) / PROJECTIONS)


@dataclass(frozen=True)
class StepSketch:
    """The gradients that one optimizer used in a step."""

    step: Count
    gradients: tuple[GradientSketch, ...]
