"""Test the rates of a device: their unit, and that a full device gives none."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from launch.contract.records.gpu_rates import GpuRates
from launch.train.telemetry import gpu_rates
from launch.train.telemetry.gpu_rates import measure_rates

CPU = torch.device("cpu")


def test_rates_are_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product takes 2 x 8**3 operations, a copy reads and writes 1,000 bytes, and each call takes 2 ms."""
    clock = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: 2e-3 * next(clock))
    assert measure_rates(CPU, "fp32", side=8, copied=1000) == GpuRates(
        "fp32", pytest.approx(1024 / 2e-3), pytest.approx(2000 / 2e-3)
    )


def test_memory_that_is_full_gives_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_rates.torch, "zeros", full)
    assert measure_rates(CPU, "bf16", side=8, copied=1000) is None
