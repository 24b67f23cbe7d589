"""Take optimizer steps by hand, from gradients that a test has computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launch.engines.torch_native.optim.adamw import Optimizer
from launch.engines.torch_native.optim.flat_parameters import FlatParameters


def accumulate(main: FlatParameters, gradients: Sequence[torch.Tensor], share: float) -> None:
    """Add ``share`` times ``gradients``, in the order of ``main.parameters``, to the main gradients."""
    torch._foreach_add_(main._gradient_views, list(gradients), alpha=share / main.mesh.dims.dp)


def take_step(optimizer: Optimizer, step: int) -> torch.Tensor:
    """Run step number ``step``, and clear the gradients for the next. Return their norm before clipping, shape ()."""
    optimizer.set_rate(step)
    norm = optimizer.update()
    optimizer._main.clear_gradients()
    return norm
