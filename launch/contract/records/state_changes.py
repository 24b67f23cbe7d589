"""What a user's program changes after the capture although no optimizer steps it."""

from __future__ import annotations

from dataclasses import dataclass

from launch.common.typed_json import Count


@dataclass(frozen=True)
class StateChanges:
    """``digest`` is of the last values of the changed tensors, in no order; ``tensors`` is their number."""

    digest: str
    tensors: Count
