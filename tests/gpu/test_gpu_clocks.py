"""On a GPU, test that the driver's figures about its clocks are those of this GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import time

import pytest
import torch

from launch.train.telemetry.gpu_clocks import BITS, Gpu, PhaseClocks, find_gpu, pci_address

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
LATER_THAN = 0.1
"""The tolerance, as a share of a phase's seconds. Counters and the clock of the host are not read at the same instant.
"""


def work(seconds: float) -> None:
    """Load a GPU with products of matrices, up to its power limit if they reach it."""
    left, right = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            left @ right
        torch.cuda.synchronize(DEVICE)


def test_clocks_under_load_are_those_of_a_gpu_at_work() -> None:
    clocks = PhaseClocks(DEVICE)
    assert clocks.unknown == ""
    work(1.0)
    clocks.end_phase()
    work(5.0)
    passed = clocks.end_phase()
    print(passed)
    assert passed
    assert passed.seconds == pytest.approx(5.0, abs=1.0)
    assert {"power_cap", "thermal"} <= passed.throttled.keys()
    assert all(0 <= seconds <= passed.seconds * (1 + LATER_THAN) for seconds in passed.throttled.values())
    assert passed.active is not None and set(passed.active) <= set(BITS.values())
    assert len(passed.power_limits) == 1 and passed.power_limits[0] > 50
    assert passed.sm_mhz and passed.max_sm_mhz and 300 < passed.sm_mhz <= passed.max_sm_mhz


def test_reading_takes_no_longer_than_the_memory_beside_it() -> None:
    gpu = find_gpu(pci_address(DEVICE))
    assert isinstance(gpu, Gpu)
    gpu.read()
    began = time.perf_counter()
    for _ in range(20):
        gpu.read()
    milliseconds = (time.perf_counter() - began) * 1e3 / 20
    print(f"{milliseconds:.2f} ms a reading")
    assert milliseconds < 50


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="nvidia-smi is not there to compare with")
def test_counters_are_nanoseconds_of_this_gpu() -> None:
    """nvidia-smi prints the same counters in microseconds, if it knows them."""
    gpu = find_gpu(pci_address(DEVICE))
    assert isinstance(gpu, Gpu)
    before = gpu.read().counted
    asked = subprocess.run(
        ["nvidia-smi", "-q", "-d", "PERFORMANCE", "-i", pci_address(DEVICE)], capture_output=True, text=True, check=True
    ).stdout
    after = gpu.read().counted
    print(asked)
    _, _, counters = asked.partition("Counters")
    printed = {name.strip(): int(count) for name, count in re.findall(r"^\s*(\w[\w ]*?)\s*: (\d+) us$", counters, re.M)}
    if not printed:
        pytest.skip("this nvidia-smi does not print the counters")
    for name, reason in (
        ("SW Power Capping", "power_cap"),
        ("Sync Boost", "sync_boost"),
        ("SW Thermal Slowdown", "thermal"),
    ):
        assert before[reason] // 1000 - 1 <= printed[name] <= after[reason] // 1000 + 1, name
