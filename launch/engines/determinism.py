"""PyTorch's deterministic mode."""

from __future__ import annotations

import torch


def use_deterministic_algorithms() -> None:
    """Make PyTorch use deterministic kernels from now on. An operation without one raises an error."""
    torch.use_deterministic_algorithms(True)
    # Filling new memory costs time, and nothing here reads memory before writing it. The module's type stubs lack this name,
    # hence setattr.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
