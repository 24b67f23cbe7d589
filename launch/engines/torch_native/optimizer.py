"""AdamW on fp32 master weights, with gradients accumulated in fp32 and clipped by their global norm.

Masters and main gradients are one flat buffer each, so that the norm, the clipping, the all-reduce and the update are a
few operations whatever the number of parameters, and a parameter is a view into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from launch.spec import Training

ALIGNMENT = 64
"""Elements each parameter's place is rounded up to: kernels want their operands on 128 bytes, in bfloat16 too."""


class MainParameters:
    """Master weights and main gradients of a module, both of at least float32, whose parameters become views.

    Where the module computes in the masters' own precision its parameters are views of the masters themselves.
    """

    def __init__(self, module: nn.Module) -> None:
        # Matrices come first: only they decay, and so each kind is one stretch of the buffer.
        self.parameters = sorted(module.parameters(), key=lambda parameter: parameter.dim() < 2)
        first = self.parameters[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        places = [math.ceil(p.numel() / ALIGNMENT) * ALIGNMENT for p in self.parameters]
        self.matrices = sum(place for place, p in zip(places, self.parameters, strict=True) if p.dim() >= 2)
        """Elements of the buffers that belong to matrices."""
        self._compute = torch.zeros(sum(places), dtype=first.dtype, device=first.device)
        for view, parameter in zip(self._views(self._compute), self.parameters, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self.weights = self._compute if first.dtype == dtype else self._compute.to(dtype)
        self.gradients = torch.zeros_like(self.weights)
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
            start += math.ceil(parameter.numel() / ALIGNMENT) * ALIGNMENT
        return views


class Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101); only matrices decay."""

    def __init__(self, main: MainParameters, training: Training) -> None:
        self._main = main
        self._training = training
        # On the device, so that a captured step reads the rate of the day.
        self._rate = torch.zeros((), device=main.weights.device)
        matrices, vectors = _stretch(main, slice(None, main.matrices)), _stretch(main, slice(main.matrices, None))
        self._adamw = torch.optim.AdamW(
            [{"params": [matrices], "weight_decay": training.weight_decay}, {"params": [vectors], "weight_decay": 0.0}],
            lr=self._rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_epsilon,
            fused=True,
        )

    def step(self, step: int) -> torch.Tensor:
        """Clip, update, publish and clear the gradients. Returns their global norm before clipping, shape ()."""
        self._rate.fill_(learning_rate(self._training, step))
        norm = clip(self._main.gradients, self._training.clip_grad)
        self._adamw.step()
        self._main.publish()
        self._main.gradients.zero_()
        return norm


def clip(gradients: torch.Tensor, limit: float) -> torch.Tensor:
    """Scale ``gradients`` down to a 2-norm of ``limit`` where theirs is larger; 0 is no limit. Returns their norm.

    The host does not wait for the norm (compare ``torch.nn.utils.clip_grad_norm_``, whose formula it is).
    """
    norm: torch.Tensor = torch.linalg.vector_norm(gradients)
    if limit > 0:
        gradients.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


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


def _stretch(main: MainParameters, where: slice) -> torch.Tensor:
    weights = main.weights[where]
    weights.grad = main.gradients[where]
    return weights
