"""Describe code, versions, hardware and settings: environment.json, without secrets and private paths."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from launch import ROOT
from launch.common.checkout import describe_commit, package_versions, source_digest
from launch.common.redact import is_secret_name, redact
from launch.contract.paths import IMAGE
from launch.contract.spec_ids import digest
from launch.train.telemetry import memory

SETTING_PREFIXES = (
    "NCCL_", "NVTE_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "GLOO_",
    "UCX_", "MALLOC_", "PYTHONMALLOC", "NVIDIA_TF32_OVERRIDE", "LD_PRELOAD",
)  # fmt: skip
"""Variables of graphs and of folders for compiled code are left out, as TORCHDYNAMO_DISABLE and TORCHINDUCTOR_CACHE_DIR, which
PyTorch sets itself when it compiles."""
_SET_BY_PYTORCH = ("CUDA_MODULE_LOADING", "LAZY")
"""What PyTorch before 2.11 sets when it first uses CUDA, as when it compiles on a host without a GPU. Unset means the same."""


def describe(device: torch.device, data_digest: str, weights_digest: str | None) -> dict[str, Any]:
    """Return the content of environment.json. ``weights_digest`` belongs to a checkpoint; None means random weights."""
    found = versions()
    code = {**describe_commit(ROOT, ["launch"]), "digest": source_digest()}
    return {
        "versions": found,
        "code": code,
        "hardware": hardware(device),
        "settings": _settings(os.environ),
        **({"image": redact(image)} if (image := os.environ.get(IMAGE)) else {}),
        "data_digest": data_digest,
        "digests": {"code": code["digest"], "libraries": digest(found)}
        | ({"weights": weights_digest} if weights_digest else {}),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), **package_versions()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    return {
        "hosts": [socket.gethostname()],
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "memory_bytes": memory.host_total(),
        "gpus": [gpu.name for gpu in gpus],
        "gpu_memory_bytes": [gpu.total_memory for gpu in gpus],
        "gpu_ids": [str(gpu.uuid) for gpu in gpus],
        "driver": driver() if gpus else None,
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def driver() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


def _settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: redact(value)
        for name, value in sorted(environment.items())
        if name.startswith(SETTING_PREFIXES) and not is_secret_name(name) and (name, value) != _SET_BY_PYTORCH
    }
