"""What a user's program changes after the capture: what no optimizer steps, and which parameters stay as they were."""

from __future__ import annotations

from dataclasses import dataclass

from launch.common.typed_json import Amount, Count
from launch.contract.records.gradient_sketch import GradientSketch


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor of floats that has changed. ``last`` sketches its last value, and ``change`` estimates the norm of its change."""

    last: GradientSketch
    change: Amount


@dataclass(frozen=True)
class StateChanges:
    """``digest`` is of the last values of the changed tensors that no optimizer steps, in no order; ``tensors`` is their number."""

    digest: str
    tensors: Count
    counters: str
    """A digest of the last values of those that are one whole number, such as a number of batches. Rounding changes none."""
    values: tuple[ChangedTensor, ...]
    """Those that are floats. Several modules may use one name."""
    unchanged: tuple[str, ...]
    """The names of the parameters that an optimizer steps, but that have not changed."""
