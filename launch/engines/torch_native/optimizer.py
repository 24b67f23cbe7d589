"""AdamW on fp32 master weights, with gradients accumulated in fp32 (or bf16) and clipped by their global norm.

Masters and main gradients are one flat buffer each, so that the norm, the clipping, the all-reduce and the update are a
few operations whatever the number of parameters, and a parameter is a view into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Optional

import torch
from torch import nn

from launch.spec import Training

ALIGNMENT = 64
"""Elements each parameter's place is rounded up to: kernels want their operands on 128 bytes, in bfloat16 too."""

CONVERTED_AT_ONCE = 2**26
"""Gradients that are converted to the masters' precision at once."""


class MainParameters:
    """Master weights and main gradients of a module, whose parameters become views.

    Masters are of at least float32; where the module computes in their precision its parameters are views of the
    masters themselves. Gradients are of ``gradient_dtype``, by default that of the masters.
    """

    def __init__(self, module: nn.Module, gradient_dtype: Optional[torch.dtype] = None) -> None:
        # What decays comes first, and so each kind is one stretch of the buffer.
        named = sorted(module.named_parameters(), key=lambda pair: not _decays(*pair))
        self.parameters = [parameter for _, parameter in named]
        first = self.parameters[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        self.decaying = sum(_place(parameter) for name, parameter in named if _decays(name, parameter))
        """Elements of the buffers that weight decay is for."""
        size = sum(_place(parameter) for parameter in self.parameters)
        self._compute = torch.zeros(size, dtype=first.dtype, device=first.device)
        for view, parameter in zip(self._views(self._compute), self.parameters, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.weights = self._compute if first.dtype == dtype else self._compute.to(dtype)
        self.gradients = torch.zeros_like(self.weights, dtype=gradient_dtype or dtype)
        self._gradient_views = self._views(self.gradients)

    def accumulate(self, gradients: Sequence[torch.Tensor], scale: float) -> None:
        """Add ``scale`` times a micro-batch's gradients, which are in the order of ``parameters``."""
        torch._foreach_add_(self._gradient_views, list(gradients), alpha=scale)

    def publish(self) -> None:
        """Round the masters to what the module computes with."""
        if self._compute is not self.weights:
            self._compute.copy_(self.weights)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        views, start = [], 0
        for parameter in self.parameters:
            views.append(flat[start : start + parameter.numel()].view(parameter.shape))
            start += _place(parameter)
        return views


def _decays(name: str, parameter: torch.Tensor) -> bool:
    """Matrices do. The experts' biases have two dimensions and are none."""
    return parameter.dim() >= 2 and not name.endswith("bias")


def _place(parameter: torch.Tensor) -> int:
    return math.ceil(parameter.numel() / ALIGNMENT) * ALIGNMENT


class Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101); only matrices decay."""

    def __init__(self, main: MainParameters, training: Training) -> None:
        self._main = main
        self._training = training
        # On the device, so that a captured step reads the rate of the day.
        self._rate = torch.zeros((), device=main.weights.device)
        bounds = _bounds(main)
        self._pieces = [
            _Piece(main.weights[start:end], main.gradients[start:end], self._adamw_of(start < main.decaying))
            for start, end in pairwise(bounds)
        ]

    def step(self, step: int) -> torch.Tensor:
        """Clip, update, publish and clear the gradients. Returns their global norm before clipping, shape ()."""
        self._rate.fill_(learning_rate(self._training, step))
        norm, scale = clipping(self._main.gradients, self._training.clip_grad)
        for piece in self._pieces:
            piece.step(scale)
        self._main.publish()
        self._main.gradients.zero_()
        return norm

    def _adamw_of(self, decays: bool) -> Callable[[torch.Tensor], torch.optim.Optimizer]:
        return lambda weights: torch.optim.AdamW(
            [weights],
            weight_decay=self._training.weight_decay if decays else 0.0,
            lr=self._rate,
            betas=(self._training.adam_beta1, self._training.adam_beta2),
            eps=self._training.adam_epsilon,
            fused=True,
        )


class _Piece:
    """A stretch of the buffers under one AdamW, whose kernel wants gradients in the precision of the weights."""

    def __init__(
        self,
        weights: torch.Tensor,
        gradients: torch.Tensor,
        adamw_of: Callable[[torch.Tensor], torch.optim.Optimizer],
    ) -> None:
        self._weights = weights
        self._gradients = gradients
        self._adamw = adamw_of(weights)

    def step(self, scale: Optional[torch.Tensor]) -> None:
        gradients = self._gradients
        same = gradients.dtype == self._weights.dtype
        gradients = gradients if same else gradients.to(self._weights.dtype)
        if scale is not None:
            torch._foreach_mul_([gradients], scale)  # in vectors, which mul_ with a tensor on the device is not
        self._weights.grad = gradients
        self._adamw.step()
        self._weights.grad = None


def _bounds(main: MainParameters) -> list[int]:
    """Where pieces begin and end. Gradients of another precision are converted piece by piece: whole they would take
    the memory that their precision saves."""
    size, stride = len(main.weights), len(main.weights)
    if main.gradients.dtype != main.weights.dtype:
        stride = CONVERTED_AT_ONCE
    starts = {*range(0, main.decaying, stride), *range(main.decaying, size, stride)}
    return [*sorted(starts), size]


def clipping(gradients: torch.Tensor, limit: float) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """The gradients' 2-norm, and what to multiply them by for it to be at most ``limit``; None for a limit of 0.

    The host does not wait for the norm (compare ``torch.nn.utils.clip_grad_norm_``, whose formula it is).
    """
    norm = torch.linalg.vector_norm(gradients, dtype=torch.promote_types(gradients.dtype, torch.float32))
    return norm, (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else None


def learning_rate(training: Training, step: int) -> float:
    """The rate of ``step``, counted from 0: a linear warm-up that reaches the full rate with its last step, then
    constant, or a half cosine from the full rate down to ``min_learning_rate`` at ``steps``.
    """
    warmup, top, bottom = training.learning_rate_warmup_steps, training.learning_rate, training.min_learning_rate
    if step < warmup:
        return top * (step + 1) / warmup
    if training.learning_rate_schedule == "constant":
        return top
    progress = min(1.0, (step - warmup) / max(1, training.steps - warmup))
    return bottom + (top - bottom) * (1 + math.cos(math.pi * progress)) / 2
