"""Perturb a program by the smallest errors that other kernels could make, to measure how far rounding goes.

Kernels that round differently, such as compiled ones, do so in each module and in each step. So the perturbation does, too. A single
change of fp32 numbers would show almost nothing of a program that computes in bf16 under autocast.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from launch.observe.optimizers import Optimizers

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""The types of numbers of which PyTorch knows the next one."""
SEED = 20_231


class Perturbation:
    """Moves each output of each module by one unit in the last place, up or down at random.

    Compiled code calls no hooks, and some programs have no modules. Then weights are moved once instead.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._generators: dict[torch.device, torch.Generator] = {}
        self._moves = False

    def begin(self) -> None:
        """Perturb the step that begins now, and all later ones."""
        if not _compiles():
            register_module_forward_hook(self._move_output)

    def describe(self) -> str:
        """Return what the first perturbed step has moved, in words. If it moved nothing, move the weights."""
        if self._moves:
            return "the output of each module is moved by one unit in the last place"
        weights = [one for one in self._optimizers.own_parameters() if one.dtype in DTYPES]
        for weight in weights:
            # Not the tensor itself: the program's backward pass may need it, and autograd refuses a tensor that has changed.
            weight.data.add_(self._unit(weight.data))
        return f"no module gave an output, so {len(weights)} weights are moved by one unit in the last place"

    def _move_output(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        first = outputs[0] if type(outputs) is tuple and outputs else outputs
        if not isinstance(first, torch.Tensor) or not first.requires_grad or first.dtype not in DTYPES:
            return outputs
        # A capture of the program could not draw from a generator that its graph does not know.
        if next(module.children(), None) is not None or (first.is_cuda and torch.cuda.is_current_stream_capturing()):
            return outputs
        self._moves = True
        moved = first + self._unit(first.detach())
        return moved if first is outputs else (moved, *outputs[1:])

    def _unit(self, values: torch.Tensor) -> torch.Tensor:
        """Return the distances of ``values`` to the next numbers, up or down at random, in their shape."""
        device = values.device
        # The program's own generators stay as they are.
        generator = self._generators.setdefault(device, torch.Generator(device).manual_seed(SEED))
        up = torch.rand(values.shape, generator=generator, device=device) < 0.5
        toward = torch.where(up, math.inf, -math.inf).to(values.dtype)
        return torch.nextafter(values, toward) - values


def _compiles() -> bool:
    """Return whether the program has compiled code."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"].get("unique_graphs", 0) > 0
