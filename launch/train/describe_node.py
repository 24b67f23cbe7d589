"""Describe this node for ``doctor``: ``python -m launch.train.describe_node FILE`` prints one JSON object."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from launch.contract.records.memory import foreign_bytes
from launch.train.telemetry.memory import sample
from launch.train.telemetry.provenance import driver, hardware, versions

_IMPORTED = ("numpy", "safetensors")
"""The packages that ranks import besides torch. The tokenizers package is needed only if a recipe names a tokenizer."""


def describe_node(file: Path) -> dict[str, Any]:
    """Return time, software and devices of this node, and whether it sees ``file``, which another host wrote."""
    has_gpu = torch.cuda.is_available()
    nccl = torch.cuda.nccl.version() if has_gpu and torch.distributed.is_nccl_available() else ()
    return {
        "host": socket.gethostname(),
        "time": time.time(),
        "sees_file": file.is_file(),
        "write_error": _write(file),
        "python": sys.executable,
        "missing": missing_packages(),
        "driver": driver(),
        "versions": versions(),
        "hardware": hardware(torch.device("cuda" if has_gpu else "cpu")),
        "foreign_bytes": [foreign_bytes(sample(torch.device("cuda", gpu))) for gpu in range(torch.cuda.device_count())],
        "cudnn": torch.backends.cudnn.version() if has_gpu else None,
        "nccl": ".".join(map(str, nccl)),
        "other_cudnn": other_cudnn(os.environ.get("LD_LIBRARY_PATH", "")),
    }


def _write(file: Path) -> str:
    """Write this node's name into ``file`` if the file exists. Return why that failed, or ""."""
    try:
        if file.is_file():
            file.write_text(socket.gethostname())
    except OSError as error:
        return str(error.strerror)
    return ""


def missing_packages() -> list[str]:
    """Return the packages that ranks import and this interpreter lacks."""
    old = [] if hasattr(torch.nn.functional, "grouped_mm") else ["torch>=2.11"]
    return [*old, *(name for name in _IMPORTED if find_spec(name) is None)]


def other_cudnn(library_path: str) -> list[str]:
    """Return the cuDNN libraries in the folders of ``library_path``. The loader prefers them to PyTorch's own."""
    folders = [Path(name) for name in library_path.split(os.pathsep) if name]
    return sorted({str(file) for folder in folders for file in folder.glob("libcudnn.so*")})


if __name__ == "__main__":
    sys.stdout.write(json.dumps(describe_node(Path(sys.argv[1]))) + "\n")
