"""AdamW on master weights, with gradients clipped by the global norm of the whole model's, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim.adamw import adamw

from launch.contract.spec import Training
from launch.engines.lr_schedule import learning_rate
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.optim.fused_kernels import FusedAdamW
from launch.engines.torch_native.parallel.data_parallel import total

CONVERTED_AT_ONCE = 2**26
"""Gradients that are converted to the masters' precision at once: all of them would take the memory that their own
precision saves."""

Slice = tuple[torch.Tensor, torch.Tensor]
"""Successive weights and their gradients."""


class Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101); only matrices decay."""

    def __init__(self, main: FlatParameters, training: Training) -> None:
        self._main = main
        self._training = training
        # On the device, so that a captured step reads the rate of the day.
        self._rate = torch.zeros((), device=main.weights.device)
        self._counted = main.weights.new_tensor([1 / stretch.copies for stretch in main.stretches])
        self._adamw = _AdamW(main, training) if training.compile == "none" else FusedAdamW(main, training)

    def set_rate(self, step: int) -> None:
        """The learning rate of ``step``, put on the device."""
        self._rate.fill_(learning_rate(self._training, step))

    def update(self) -> torch.Tensor:
        """Clip, update, publish and clear the gradients. Returns their global norm before clipping, shape ()."""
        norm = self._norm()
        self._adamw.step(clipping(norm, self._training.clip_grad), self._rate)
        if self._main.is_cleared:
            self._main.gradients.zero_()
        return norm

    def _norm(self) -> torch.Tensor:
        """The 2-norm of the whole model's gradients: what several ranks hold is counted once."""
        gradients = [stretch.gradients for stretch in self._main.stretches]
        norms = torch._foreach_norm(gradients, 2, dtype=self._main.weights.dtype)
        squares = (torch.stack(norms).square() * self._counted).sum()
        total(self._main.mesh.world, squares)
        return squares.sqrt()


class _AdamW:
    """PyTorch's, over the stretches in pieces."""

    def __init__(self, main: FlatParameters, training: Training) -> None:
        self._main = main
        self._training = training
        self._rate = torch.zeros((), device=main.weights.device)
        most = len(main.weights) if main.gradients.dtype == main.weights.dtype else CONVERTED_AT_ONCE
        self._pieces = [
            _Piece(slices, self._rate, training, training.weight_decay if decays else 0.0)
            for decays in (True, False)
            for slices in _pack(_slices(main, decays, most), most)
        ]

    def step(self, scale: torch.Tensor | None, rate: torch.Tensor) -> None:
        """One update with gradients times ``scale``, published. A collective call."""
        self._rate.copy_(rate)
        for piece in self._pieces:
            piece.step(scale)
        self._main.publish()


class _Piece:
    """Slices that are updated by one call, whose kernel wants gradients in the precision of the weights. The function
    and not ``torch.optim.AdamW``: to make that object PyTorch loads Dynamo, which takes as long as all the rest of it.
    """

    def __init__(self, slices: list[Slice], rate: torch.Tensor, training: Training, weight_decay: float) -> None:
        self._slices = slices
        self._rate = rate
        self._training = training
        self._weight_decay = weight_decay
        self._moments: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, scale: torch.Tensor | None) -> None:
        weights = [weights for weights, _ in self._slices]
        gradients = [gradients.to(weights.dtype) for weights, gradients in self._slices]
        if scale is not None:
            torch._foreach_mul_(gradients, scale)  # in vectors, which mul_ with a tensor on the device is not
        if not self._moments:
            self._moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in weights]
            self._steps = [torch.zeros((), dtype=torch.float32, device=each.device) for each in weights]
        adamw(
            weights, gradients, [first for first, _ in self._moments], [second for _, second in self._moments], [],
            self._steps, fused=True, capturable=self._rate.is_cuda, amsgrad=False, maximize=False, lr=self._rate,
            beta1=self._training.adam_beta1, beta2=self._training.adam_beta2, eps=self._training.adam_epsilon,
            weight_decay=self._weight_decay,
        )  # fmt: skip


def _slices(main: FlatParameters, decays: bool, most: int) -> list[Slice]:
    return [
        slice
        for stretch in main.stretches
        if stretch.decays == decays
        for slice in zip(stretch.weights.split(most), stretch.gradients.split(most), strict=True)
    ]


def _pack(slices: Iterable[Slice], most: int) -> list[list[Slice]]:
    """Neighbours together, up to ``most`` elements."""
    packs: list[list[Slice]] = []
    room = 0
    for weights, gradients in slices:
        if len(weights) > room:
            packs.append([])
            room = most
        packs[-1].append((weights, gradients))
        room -= len(weights)
    return packs


def clipping(norm: torch.Tensor, limit: float) -> torch.Tensor | None:
    """What to multiply gradients of this norm by for it to be at most ``limit``; None for a limit of 0.

    The host does not wait for the norm (compare ``torch.nn.utils.clip_grad_norm_``, whose formula it is).
    """
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else None
