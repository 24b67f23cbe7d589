"""Deterministic mode, as PyTorch is told of it."""

from __future__ import annotations

import torch


def use_deterministic_algorithms() -> None:
    """From here on an operation that has no deterministic kernel is an error, and none is chosen that has one beside it."""
    torch.use_deterministic_algorithms(True)
    # It would fill all memory before it is written, for nothing that is read.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - it is not in its type
