"""The rates that a rank's GPU reached after the run's last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launch.common.typed_json import Amount


@dataclass(frozen=True)
class GpuRates:
    """``flops`` are operations per second of a square matrix product in ``precision``, with the run's own settings.

    ``bandwidth`` is in bytes per second, read and written, of a copy within the GPU's memory.
    """

    precision: Literal["fp32", "bf16"]
    flops: Amount
    bandwidth: Amount
