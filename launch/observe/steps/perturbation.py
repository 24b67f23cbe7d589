"""Perturb a program by the smallest errors that other kernels could make, to measure how far rounding goes.

Kernels that round differently, such as compiled ones, do so in each module and in each step. So does the perturbation. A single
change of fp32 numbers would show almost nothing of a program that computes in bf16 under autocast.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules.module import register_module_forward_hook

from launch.engines.perturbation import next_after, next_output
from launch.observe.state.optimizers import Optimizers
from launch.train.inspection.capture_blockers import compiled_functions

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The types of numbers of which PyTorch knows the next one."""
SEED = 20_231


class Perturbation:
    """Moves each output of a leaf module by one unit in the last place, up or down at random.

    Compiled code calls no hooks, and some programs have no modules. Then weights are moved once instead.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._generators: dict[torch.device, torch.Generator] = {}
        self._moves = False

    def begin(self) -> None:
        """Perturb the step that begins now, and all later ones."""
        if not compiled_functions():
            register_module_forward_hook(self._move_output)

    def end_first_step(self) -> str:
        """Move the weights if the first perturbed step has moved nothing. Return what is moved, in words."""
        if self._moves:
            return "the output of each leaf module is moved by one unit in the last place"
        weights = [one for one in self._optimizers.own_parameters() if one.dtype in DTYPES]
        for weight in weights:
            # Not the tensor itself: the program's backward pass may need it, and autograd refuses a tensor that has changed.
            weight.data.copy_(next_after(weight.data, self._directions(weight.data)))
        return f"no module gave an output, so {len(weights)} weights are moved by one unit in the last place"

    def _move_output(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        first = outputs[0] if type(outputs) is tuple and outputs else outputs
        if not isinstance(first, torch.Tensor) or not first.requires_grad or first.dtype not in DTYPES:
            return outputs
        # Inside vmap, PyTorch refuses random numbers.
        if peek_interpreter_stack() is not None:
            return outputs
        # A capture of the program could not draw from a generator that its graph does not know.
        if next(module.children(), None) is not None or (first.is_cuda and torch.cuda.is_current_stream_capturing()):
            return outputs
        self._moves = True
        return next_output(outputs, self._directions(first))

    def _directions(self, values: torch.Tensor) -> torch.Tensor:
        """Return infinity or minus infinity at random for each of ``values``, in their shape.

        Return 0 and 1 themselves, of either sign: kernels return them exactly. Programs rely on these limits of a probability.
        """
        device = values.device
        # The program's own generators stay as they are.
        generator = self._generators.setdefault(device, torch.Generator(device).manual_seed(SEED))
        up = torch.rand(values.shape, generator=generator, device=device) < 0.5
        toward = torch.where(up, math.inf, -math.inf).to(values.dtype)
        return torch.where((values == 0) | (values.abs() == 1), values, toward)
