"""A perturbation by one unit in the last place, the smallest error that another kernel could make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def next_after(values: torch.Tensor, toward: float | torch.Tensor = math.inf) -> torch.Tensor:
    """Return the next number ``toward`` another for each value: (...) -> (...). Gradients pass through unchanged.

    Infinities stay, and so do the largest numbers, which would become infinite: masks add both.
    """
    with torch.no_grad():
        others = toward if isinstance(toward, torch.Tensor) else torch.full_like(values, toward)
        unit = torch.nextafter(values, others) - values
    return values + torch.where(unit.isfinite(), unit, 0.0)


def next_output(outputs: Any, toward: float | torch.Tensor = math.inf) -> Any:
    """Return what a layer returned with its output perturbed. A Mamba layer returns a tensor, others a tuple that begins with it."""
    if isinstance(outputs, torch.Tensor):
        return next_after(outputs, toward)
    return next_after(outputs[0], toward), *outputs[1:]


@contextmanager
def outputs_perturbed(modules: Iterable[nn.Module], toward: float) -> Iterator[None]:
    """Perturb the outputs of ``modules`` inside the context."""

    def perturb(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return next_output(outputs, toward)

    hooks = [module.register_forward_hook(perturb) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
