"""What Transformer Engine's delayed scaling keeps from pass to pass. Its other recipes of fp8 keep nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn


def delayed_scaling(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the states of ``modules``: DelayedScalingRecipeState, with the tensors ``scale`` and ``amax_history``."""
    for module in modules:
        yield from (state for state in getattr(module, "fp8_meta", {}).values() if hasattr(state, "amax_history"))


def fp8_scales(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return the scales of ``modules``, and the largest numbers that they come from."""
    return [tensor for state in delayed_scaling(modules) for tensor in (state.scale, state.amax_history)]
