"""Test what a fork server's imports see of GPUs. tests/unit/launch/supervise/test_forked_ranks.py tests the rest."""

from __future__ import annotations

import os

import pytest
import torch

from launch.train.fork_server import hidden_gpus


@pytest.mark.parametrize("devices", ["0", "GPU-8a7c", "", None])
def test_imports_see_no_gpu_but_know_whether_ranks_have_one(
    devices: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    before, ask = dict(os.environ), torch.cuda.is_available
    with hidden_gpus():
        assert torch.cuda.is_available() == bool(devices)
        assert torch.cuda.device_count() == 0
    assert torch.cuda.is_available is ask and dict(os.environ) == before
