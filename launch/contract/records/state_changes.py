"""What a user's program changes after the capture: what no optimizer steps, and which parameters stay as they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launch.common.typed_json import Count
from launch.contract.records.sketch import ChangedTensor

NOT_STEPPED = " (no optimizer steps it)"
"""What follows the name of an unchanged tensor that no optimizer steps, such as an average. The weight may have the same name."""


@dataclass(frozen=True)
class StateChanges:
    """``digest`` is of the last values of the changed tensors that no optimizer steps, in no order; ``tensors`` is their number."""

    digest: str
    tensors: Count
    counters: Mapping[str, int]
    """The last values of whole numbers that grew by the same in each step on average, such as numbers of batches. Rounding changes
    numbers that depend on routing, but these hardly grow by a multiple of the steps."""
    values: tuple[ChangedTensor, ...]
    """Those that are floats. Several modules may use one name."""
    unchanged: tuple[str, ...]
    """The names of what has not changed since the middle of the run: parameters that an optimizer steps, and changed tensors."""
