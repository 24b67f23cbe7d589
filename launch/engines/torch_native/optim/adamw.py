"""AdamW on master weights, with gradients clipped by the global norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.optim.adamw import adamw

from launch.contract.spec import Training
from launch.engines.lr_schedule import learning_rate
from launch.engines.torch_native.optim.flat_parameters import FlatParameters, OptimizerShard
from launch.engines.torch_native.optim.fused_kernels import FusedAdamW
from launch.engines.torch_native.optim.piece import PIECE_ELEMENTS, Piece, make_piece
from launch.engines.torch_native.parallel.data_parallel import all_reduce_sum

CONVERTED_ELEMENTS = 2**26
"""The number of gradients converted to the precision of master weights at once. Converting all at once would take the memory
that their lower precision saves."""
SUMMED_ELEMENTS = 2**16
"""The number of gradients whose squares a CPU adds up in a row."""


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

    @property
    def pieces(self) -> Sequence[Piece]:
        return self._adamw.pieces

    @contextmanager
    def updating_only(self, pieces: Sequence[Piece]) -> Iterator[None]:
        """Change no weights and moments outside ``pieces`` inside the context, also in replays of graphs."""
        held = [piece.held for piece in self.pieces if piece not in pieces]
        for flag in held:
            flag.fill_(1)
        try:
            yield
        finally:
            for flag in held:
                flag.zero_()

    def step_counts(self) -> list[torch.Tensor]:
        return self._adamw.step_counts()

    def state(self) -> list[torch.Tensor]:
        """Return moments and step counts."""
        return [moment for piece in self.pieces for both in piece.moments for moment in both] + self.step_counts()

    def norm(self) -> torch.Tensor:
        """Return the 2-norm of the whole model's gradients, shape (). Replicated parameters count once."""
        if (squares := self._main.squared_norm()) is not None:
            return squares.sqrt()
        norms = _norms([shard.gradients for shard in self._main.shards], self._main.precision)
        squares = (norms.square() * self._copies_inverse).sum()
        all_reduce_sum(self._main.mesh.world, squares)
        return squares.sqrt()


class _AdamW:
    """PyTorch's fused AdamW, applied to the shards in pieces."""

    def __init__(self, main: FlatParameters, training: Training) -> None:
        self._main = main
        self._training = training
        self.clips_in_place = main.gradients.dtype == main.weights.dtype
        most = PIECE_ELEMENTS if self.clips_in_place else CONVERTED_ELEMENTS
        self._calls = [
            _Call(make_piece(shards, shards[0].weights.dtype), training, training.weight_decay if decays else 0.0)
            for decays in (True, False)
            for shards in _pack(_cut(main, decays, most), most)
        ]
        self.pieces = [call.piece for call in self._calls]

    def step(self, scale: torch.Tensor | None, rate: torch.Tensor) -> None:
        """Update master and compute weights with gradients times ``scale``. Both have shape (). A collective call."""
        for call in self._calls:
            call.step(scale, rate)
        self._main.write_compute_weights()

    def step_counts(self) -> list[torch.Tensor]:
        return [steps for call in self._calls for steps in call.steps]


@dataclass(eq=False)
class _Call:
    """Updates ``piece`` by one kernel call.

    It calls the function instead of ``torch.optim.AdamW``, whose constructor loads Dynamo. That takes as long as the rest of
    PyTorch's import.
    """

    piece: Piece
    training: Training
    weight_decay: float
    steps: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = [torch.zeros_like(self.piece.held) for _ in self.piece.shards]

    @torch.no_grad()
    def step(self, scale: torch.Tensor | None, rate: torch.Tensor) -> None:
        weights = [shard.weights for shard in self.piece.shards]
        # The kernel needs gradients in the precision of the weights.
        gradients = [shard.gradients.to(shard.weights.dtype) for shard in self.piece.shards]
        if scale is not None:
            # Vectorized, unlike mul_ with a tensor on the device.
            torch._foreach_mul_(gradients, scale)
        firsts, seconds = ([both[number] for both in self.piece.moments] for number in range(2))
        # The kernel leaves everything as it is if ``found_inf`` is 1.
        adamw(
            weights, gradients, firsts, seconds, [], self.steps, found_inf=self.piece.held,
            fused=True, capturable=rate.is_cuda, amsgrad=False, maximize=False, lr=rate,
            beta1=self.training.adam_beta1, beta2=self.training.adam_beta2, eps=self.training.adam_epsilon,
            weight_decay=self.weight_decay,
        )  # fmt: skip


def _cut(main: FlatParameters, decays: bool, most: int) -> list[OptimizerShard]:
    """Divide the shards with or without weight decay into shards of at most ``most`` elements."""
    return [part for shard in main.shards if shard.decays == decays for part in shard.cut(most)]


def _pack(shards: Iterable[OptimizerShard], most: int) -> list[list[OptimizerShard]]:
    """Group neighbouring shards into lists of at most ``most`` elements."""
    packs: list[list[OptimizerShard]] = []
    room = 0
    for shard in shards:
        if len(shard.weights) > room:
            packs.append([])
            room = most
        packs[-1].append(shard)
        room -= len(shard.weights)
    return packs


def _norms(gradients: list[torch.Tensor], precision: torch.dtype) -> torch.Tensor:
    """Return the 2-norm of each of ``gradients`` in ``precision``, shape (gradients,)."""
    if gradients[0].is_cuda:
        return torch.stack(torch._foreach_norm(gradients, 2, dtype=precision))
    # On a CPU, PyTorch adds the squares of a tensor one after another. In float32 this loses 0.4% of 50 million elements' norm.
    parts = (torch._foreach_norm(one.split(SUMMED_ELEMENTS), 2, dtype=precision) for one in gradients)
    return torch.stack([torch.linalg.vector_norm(torch.stack(norms)) for norms in parts])


def clip_scale(norm: torch.Tensor, limit: float) -> torch.Tensor | None:
    """Return the factor, shape (), that limits a gradient norm of shape () to ``limit``; None for a limit of 0.

    The formula is that of ``torch.nn.utils.clip_grad_norm_``, but the host does not wait for the norm.
    """
    return (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else None
