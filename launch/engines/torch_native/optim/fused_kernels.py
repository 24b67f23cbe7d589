"""AdamW in one pass over memory, with ``training.compile``: a Triton kernel on CUDA, and PyTorch's operators elsewhere.

It is bound by memory bandwidth. With a bfloat16 parameter and all else in float32, the update moves 30 bytes per parameter.
Separate operators move 42.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from launch.contract.spec import Training
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.optim.piece import PIECE_ELEMENTS, Piece, make_piece
from launch.engines.torch_native.optim.split_masters import join, split


class FusedAdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101), fused with clipping and with rounding to the compute precision."""

    clips_in_place = False

    def __init__(self, main: FlatParameters, training: Training) -> None:
        self._main = main
        self._betas = (training.adam_beta1, training.adam_beta2)
        self._steps = torch.zeros((), dtype=torch.float64, device=main.weights.device)
        self._one = torch.ones((), dtype=main.precision, device=main.weights.device)
        self._groups = [(_make_kernel(main, training, decays), _pieces(main, decays)) for decays in (True, False)]
        self.pieces = [piece for _, pieces in self._groups for piece in pieces]

    def step(self, scale: torch.Tensor | None, rate: torch.Tensor) -> None:
        """Update master and compute weights with gradients times ``scale``. A collective call.

        Args:
            scale: shape (); None is 1.
            rate: the learning rate, float32 of shape ().
        """
        self._steps.add_(1)
        corrections = [(1 - beta**self._steps).to(self._one.dtype) for beta in self._betas]
        for update, pieces in self._groups:
            for piece in pieces:
                (shard,), (moments,) = piece.shards, piece.moments
                # The kernel also writes compute weights if they are a tensor of their own.
                compute = None if shard.is_shared else shard.compute
                scalars = self._one if scale is None else scale, rate, *corrections, piece.held
                update(shard.weights, shard.gradients, compute, *moments, *scalars)
        self._main.gather_compute_weights()

    def step_counts(self) -> list[torch.Tensor]:
        return [self._steps]


def _pieces(main: FlatParameters, decays: bool) -> list[Piece]:
    """Return pieces of one shard each, with or without weight decay."""
    dtype = torch.bfloat16 if main.is_lean else main.weights.dtype
    parts = (part for shard in main.shards if shard.decays == decays for part in shard.cut(PIECE_ELEMENTS))
    return [make_piece([part], dtype) for part in parts]


def _make_kernel(main: FlatParameters, training: Training, decays: bool) -> Callable[..., None]:
    """Return what updates the slices of ``main`` with or without weight decay."""
    if not main.weights.is_cuda:
        return adamw_in_operators(training, decays, main.is_lean)
    from launch.engines.torch_native.optim.adamw_kernel import AdamWKernel  # Triton is only where CUDA is

    return AdamWKernel(training, decays, main.is_lean)


def adamw_in_operators(training: Training, decays: bool, lean: bool) -> Callable[..., None]:
    """Return the update of a piece in PyTorch's operators, the reference of AdamWKernel.

    A lean one is the update of fp32 AdamW on the joined masters. Then moments are rounded to bfloat16, to nearest and ties to
    even.
    """
    update = _adamw(training, decays)
    if not lean:
        return update

    def update_halves(
        low: torch.Tensor,
        gradients: torch.Tensor,
        weights: torch.Tensor,
        mean: torch.Tensor,
        square: torch.Tensor,
        *scalars: torch.Tensor,
    ) -> None:
        masters, first, second = join(weights, low), mean.float(), square.float()
        update(masters, gradients, None, first, second, *scalars)
        for into, value in zip((weights, low, mean, square), (*split(masters), first, second), strict=True):
            into.copy_(value)

    return update_halves


def _adamw(training: Training, decays: bool) -> Callable[..., None]:
    """Return a function that updates tensors of (elements,). Its other arguments have shape (): the gradient scale, the learning
    rate, both bias corrections, and ``held``, which is 1 if nothing changes.
    """
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
        held: torch.Tensor,
    ) -> None:
        if held:
            return
        rate = rate.to(weights.dtype)
        gradient = gradients.to(weights.dtype) * scale
        mean.mul_(beta1).add_(gradient * (1 - beta1))
        square.mul_(beta2).add_(gradient * gradient * (1 - beta2))
        change = mean / correction1 / ((square / correction2).sqrt() + epsilon)
        weights.mul_(1 - rate * decay).sub_(rate * change)
        if compute is not None:
            compute.copy_(weights)

    return update
