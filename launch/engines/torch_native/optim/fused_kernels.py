"""Accumulation of gradients and AdamW in one pass over memory each, compiled, with ``training.compile``.

Of a large model's step on a GPU these are most of what is not matrix products, and all that bounds them is bytes. A
parameter of bfloat16 with everything else in float32 takes 6 bytes for its first micro-batch, 10 for each other, 4 for
the norm and 30 for the update, where separate operators take 4, 10 for every micro-batch, 4 and 42.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from launch.contract.spec import Training
from launch.engines.torch_native.optim.flat_parameters import FlatParameters

LARGE = 2**18
"""Elements from which on a compiled call is worth its host time, some tens of microseconds."""
AT_ONCE = 2**30
"""Elements of one call: beyond 2**31 kernels compute their indices in 64 bits."""
TRIED_ON = 2**23
"""Elements on which sizes of blocks are tried: more bytes than a device caches, and few beside what it holds."""


class InPlace:
    """A compiled function of tensors of one length, and of scalars behind them, that writes to some of the former.

    Inductor tries sizes of blocks on the arguments of the first call, and restores them after each try: from copies on
    the host, where copies on the device would take more memory than was in use before (2.11
    runtime/triton_heuristics.py:1005). It times them too, so that for large tensors the choice is chance. So the first call
    is made on the beginnings of them, where there is room for copies. What is computed does not depend on blocks.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._compiled = torch.compile(function, fullgraph=True, dynamic=True)
        self._tried: set[tuple[torch.dtype | None, ...]] = set()

    def __call__(self, *arguments: torch.Tensor | None) -> None:
        kinds = tuple(None if argument is None else argument.dtype for argument in arguments)
        if kinds not in self._tried:
            self._tried.add(kinds)
            beginnings = _beginnings(arguments)
            room = _beginnings(beginnings)
            del room
            self._compiled(*beginnings)
        self._compiled(*arguments)


def _beginnings(arguments: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [
        argument if argument is None or argument.dim() == 0 else argument[:TRIED_ON].clone() for argument in arguments
    ]


class FusedAccumulation:
    """Adds a gradient's share to its main gradient; a step's first overwrites, so that nothing need be cleared."""

    def __init__(self) -> None:
        self._put, self._add = InPlace(_put), InPlace(_add)
        self._scales: dict[float, torch.Tensor] = {}

    def __call__(self, into: torch.Tensor, gradient: torch.Tensor, scale: float, first: bool) -> None:
        if gradient.numel() >= LARGE and gradient.is_contiguous():
            (self._put if first else self._add)(into.view(-1), gradient.view(-1), self._on_device(scale, into))
        elif first:
            into.copy_(gradient).mul_(scale)
        else:
            into.add_(gradient, alpha=scale)

    def _on_device(self, scale: float, into: torch.Tensor) -> torch.Tensor:
        if scale not in self._scales:
            dtype = torch.promote_types(into.dtype, torch.float32)
            self._scales[scale] = torch.full((), scale, dtype=dtype, device=into.device)
        return self._scales[scale]


def _put(into: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor) -> None:
    into.copy_(gradient.to(scale.dtype) * scale)


def _add(into: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor) -> None:
    into.add_(gradient.to(scale.dtype) * scale)


class _Slice(NamedTuple):
    """Successive elements, updated by one call."""

    weights: torch.Tensor
    gradients: torch.Tensor
    compute: torch.Tensor | None
    """What the model computes with; None where that is the weights themselves."""
    mean: torch.Tensor
    square: torch.Tensor


class FusedAdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with clipping before it and rounding to the compute precision after."""

    def __init__(self, main: FlatParameters, training: Training) -> None:
        self._main = main
        self._betas = (training.adam_beta1, training.adam_beta2)
        self._steps = torch.zeros((), dtype=torch.float64, device=main.weights.device)
        self._one = torch.ones((), dtype=main.weights.dtype, device=main.weights.device)
        self._groups = [(InPlace(_adamw(training, decays)), _slices(main, decays)) for decays in (True, False)]

    def step(self, scale: torch.Tensor | None, rate: torch.Tensor) -> None:
        """One update with gradients times ``scale``, published; both are scalars on the device. A collective call."""
        self._steps.add_(1)
        corrections = [(1 - beta**self._steps).to(self._one.dtype) for beta in self._betas]
        for update, slices in self._groups:
            for piece in slices:
                update(*piece, self._one if scale is None else scale, rate, *corrections)
        self._main.gather()


def _slices(main: FlatParameters, decays: bool) -> list[_Slice]:
    found = []
    for stretch in main.stretches:
        if stretch.decays == decays:
            separate = stretch.compute.data_ptr() != stretch.weights.data_ptr()
            for weights, gradients, compute in zip(
                *(tensor.split(AT_ONCE) for tensor in (stretch.weights, stretch.gradients, stretch.compute)),
                strict=True,
            ):
                moments = torch.zeros_like(weights), torch.zeros_like(weights)
                found.append(_Slice(weights, gradients, compute if separate else None, *moments))
    return found


def _adamw(training: Training, decays: bool) -> Callable[..., None]:
    beta1, beta2, epsilon = training.adam_beta1, training.adam_beta2, training.adam_epsilon
    decay = training.weight_decay if decays else 0.0

    def update(
        weights: torch.Tensor,
        gradients: torch.Tensor,
        compute: torch.Tensor | None,
        mean: torch.Tensor,
        square: torch.Tensor,
        scale: torch.Tensor,
        rate: torch.Tensor,
        correction1: torch.Tensor,
        correction2: torch.Tensor,
    ) -> None:
        rate = rate.to(weights.dtype)
        gradient = gradients.to(weights.dtype) * scale
        mean.mul_(beta1).add_(gradient * (1 - beta1))
        square.mul_(beta2).add_(gradient * gradient * (1 - beta2))
        change = mean / correction1 / ((square / correction2).sqrt() + epsilon)
        weights.mul_(1 - rate * decay).sub_(rate * change)
        if compute is not None:
            compute.copy_(weights)

    return update
