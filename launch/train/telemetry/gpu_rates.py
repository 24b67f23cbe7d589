"""Measure what a GPU can do: the rate of a large matrix product, and the bandwidth of its memory.

A rank measures this after its last step and its probe, when nothing else is timed. Seven products and seven copies take some ten
milliseconds on an H200, and at most a GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from launch.contract.records.gpu_rates import GpuRates
from launch.train.telemetry.step_metrics import StepTimer

DTYPES: dict[Literal["fp32", "bf16"], torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARMUP, TIMED = 2, 5
SIDE = 8192
"""The rows and columns of the matrices. Their product keeps all multiprocessors of an H200 busy, for 1.4 ms in bfloat16."""
COPIED = 1 << 29
"""Bytes of a copy, several times the cache of any GPU."""
NEEDED = 2 << 30
"""Free bytes without which nothing is measured: two copies or three matrices, their workspace and their kernels."""


def measure_rates(
    device: torch.device, precision: Literal["fp32", "bf16"], side: int = SIDE, copied: int = COPIED
) -> GpuRates | None:
    """Return the rates of ``device``, or None if its memory has no room for the matrices."""
    if device.type == "cuda":
        # Return unused memory to the driver, which may need it to load kernels.
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(device)[0] < NEEDED:
            return None
    try:
        return GpuRates(precision, _matrix_rate(device, DTYPES[precision], side), _bandwidth(device, copied))
    except torch.OutOfMemoryError:
        return None


def _matrix_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Return the operations per second of a product of two square matrices of random numbers."""
    # Do not use the default generator, because a captured step may have registered it.
    drawn = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, dtype=dtype, generator=drawn) for _ in range(2))
    product = torch.empty_like(a)
    return 2 * side**3 / _least_seconds(lambda: torch.mm(a, b, out=product), device)


def _bandwidth(device: torch.device, copied: int) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source, target = (torch.zeros(copied, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * copied / _least_seconds(lambda: target.copy_(source), device)


def _least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of ``TIMED`` calls. The host does not wait between them, so clocks stay up."""
    for _ in range(WARMUP):
        call()
    timers = [StepTimer(device) for _ in range(TIMED)]
    for timer in timers:
        timer.begin()
        call()
        timer.end()
    return min(timer.milliseconds() for timer in timers) / 1e3
