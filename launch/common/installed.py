"""What is installed for a job: the source of ``launch``, and the packages that may change a run's numbers or speed."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "torch", "triton", "numpy", "tokenizers", "transformer-engine", "megatron-core", "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13",
)  # fmt: skip
"""Distributions whose version may change a run's numbers or speed."""
SOURCE = Path(__file__).resolve().parents[1]
"""The folder of the package ``launch``."""


def package_versions() -> dict[str, str]:
    """Return the version of each installed package of ``PACKAGES``."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def source_digest() -> str:
    """Return the digest of the job's source as it is on disk."""
    content = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        content.update(str(path.relative_to(SOURCE)).encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:10]
