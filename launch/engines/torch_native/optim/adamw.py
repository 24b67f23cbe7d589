"""AdamW on master weights, with gradients clipped by the global norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.optim.adamw import adamw

from launch.contract.spec import Training
from launch.engines.lr_schedule import learning_rate
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.optim.fused_kernels import FusedAdamW
from launch.engines.torch_native.parallel.data_parallel import all_reduce_sum

CONVERTED_ELEMENTS = 2**26
"""The number of gradients converted to the precision of master weights at once. Converting all at once would take the memory
that their lower precision saves."""

Slice = tuple[torch.Tensor, torch.Tensor]
"""Contiguous master weights and their gradients, each (elements,)."""


class Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101). Only matrices decay."""

    def __init__(self, main: FlatParameters, training: Training) -> None:
        self._main = main
        self._training = training
        # On the device, so that each replay of a captured step reads the current learning rate.
        self._rate = torch.zeros((), device=main.weights.device)
        copies = [1 / shard.copies for shard in main.shards]
        self._copies_inverse = torch.tensor(copies, dtype=main.precision, device=main.weights.device)
        fused = training.compile != "none" or main.is_lean
        self._adamw = FusedAdamW(main, training) if fused else _AdamW(main, training)

    def set_rate(self, step: int) -> None:
        """Write the learning rate of ``step`` to the device."""
        self._rate.fill_(learning_rate(self._training, step))

    def update(self) -> torch.Tensor:
        """Clip the gradients and update the weights. Return the gradients' norm before clipping, shape ()."""
        norm = self.norm()
        self._adamw.step(clip_scale(norm, self._training.clip_grad), self._rate)
        return norm

    def update_again(self, norm: torch.Tensor) -> None:
        """Update the weights with the gradients that ``update`` left. Their norm before clipping was ``norm``, shape ()."""
        scale = None if self._adamw.clips_in_place else clip_scale(norm, self._training.clip_grad)
        self._adamw.step(scale, self._rate)

    def state(self) -> dict[str, torch.Tensor]:
        """Return moments and step counts by name."""
        return self._adamw.state()

    def norm(self) -> torch.Tensor:
        """Return the 2-norm of the whole model's gradients, shape (). Replicated parameters count once."""
        gradients = [shard.gradients for shard in self._main.shards]
        norms = torch._foreach_norm(gradients, 2, dtype=self._main.precision)
        squares = (torch.stack(norms).square() * self._copies_inverse).sum()
        all_reduce_sum(self._main.mesh.world, squares)
        return squares.sqrt()


class _AdamW:
    """PyTorch's fused AdamW, applied to the shards in pieces."""

    def __init__(self, main: FlatParameters, training: Training) -> None:
        self._main = main
        self._training = training
        self.clips_in_place = main.gradients.dtype == main.weights.dtype
        # Without a conversion, one piece can contain all slices.
        most = len(main.weights) if self.clips_in_place else CONVERTED_ELEMENTS
        self._pieces = [
            _Piece(slices, training, training.weight_decay if decays else 0.0)
            for decays in (True, False)
            for slices in _pack(_slices(main, decays, most), most)
        ]

    def step(self, scale: torch.Tensor | None, rate: torch.Tensor) -> None:
        """Update master and compute weights with gradients times ``scale``. Both have shape (). A collective call."""
        for piece in self._pieces:
            piece.step(scale, rate)
        self._main.write_compute_weights()

    def state(self) -> dict[str, torch.Tensor]:
        rows = [row for piece in self._pieces for row in piece.state()]
        return {f"{name} of slice {number}": one for number, row in enumerate(rows) for name, one in row.items()}


@dataclass(eq=False)
class _Piece:
    """Slices that one kernel call updates.

    It calls the function instead of ``torch.optim.AdamW``, whose constructor loads Dynamo. That takes as long as the rest of
    PyTorch's import.
    """

    slices: list[Slice]
    training: Training
    weight_decay: float
    _moments: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False, default_factory=list)
    _steps: list[torch.Tensor] = field(init=False, default_factory=list)

    def state(self) -> list[dict[str, torch.Tensor]]:
        return [
            {"first moment": first, "second moment": second, "step count": steps}
            for (first, second), steps in zip(self._moments, self._steps, strict=True)
        ]

    @torch.no_grad()
    def step(self, scale: torch.Tensor | None, rate: torch.Tensor) -> None:
        weights = [weights for weights, _ in self.slices]
        # The kernel needs gradients in the precision of the weights.
        gradients = [gradients.to(weights.dtype) for weights, gradients in self.slices]
        if scale is not None:
            # Vectorized, unlike mul_ with a tensor on the device.
            torch._foreach_mul_(gradients, scale)
        if not self._moments:
            self._moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in weights]
            self._steps = [torch.zeros((), dtype=torch.float32, device=each.device) for each in weights]
        adamw(
            weights, gradients, [first for first, _ in self._moments], [second for _, second in self._moments], [],
            self._steps, fused=True, capturable=rate.is_cuda, amsgrad=False, maximize=False, lr=rate,
            beta1=self.training.adam_beta1, beta2=self.training.adam_beta2, eps=self.training.adam_epsilon,
            weight_decay=self.weight_decay,
        )  # fmt: skip


def _slices(main: FlatParameters, decays: bool, most: int) -> list[Slice]:
    """Divide the shards with or without weight decay into slices of at most ``most`` elements."""
    return [
        slice
        for shard in main.shards
        if shard.decays == decays
        for slice in zip(shard.weights.split(most), shard.gradients.split(most), strict=True)
    ]


def _pack(slices: Iterable[Slice], most: int) -> list[list[Slice]]:
    """Group neighbouring slices into lists of at most ``most`` elements."""
    packs: list[list[Slice]] = []
    room = 0
    for weights, gradients in slices:
        if len(weights) > room:
            packs.append([])
            room = most
        packs[-1].append((weights, gradients))
        room -= len(weights)
    return packs


def clip_scale(norm: torch.Tensor, limit: float) -> torch.Tensor | None:
    """Return the factor, shape (), that limits a gradient norm of shape () to ``limit``; None for a limit of 0.

    The formula is that of ``torch.nn.utils.clip_grad_norm_``, but the host does not wait for the norm.
    """
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else None
