"""On a GPU, test the rates that a rank measures after its last step."""

from __future__ import annotations

import time

import pytest
import torch

from launch.train.telemetry.gpu_rates import NEEDED, measure_rates

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


def test_rates_are_those_of_a_gpu_and_repeat() -> None:
    first = measure_rates(DEVICE, "bf16")
    began = time.monotonic()
    again = measure_rates(DEVICE, "bf16")
    print(first, again, f"{time.monotonic() - began:.3f} s")
    assert first and again
    assert 5e13 < again.flops < 1e16 and 5e11 < again.bandwidth < 5e13
    assert again.flops == pytest.approx(first.flops, rel=0.2)
    assert again.bandwidth == pytest.approx(first.bandwidth, rel=0.1)


def test_a_full_gpu_gives_no_rates_and_no_error() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(DEVICE)
    held = torch.empty(free - NEEDED // 2, dtype=torch.uint8, device=DEVICE)
    assert measure_rates(DEVICE, "bf16") is None
    del held
