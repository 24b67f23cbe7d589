"""The elements that one kernel call updates. A step check can hold them back, although a graph contains the call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from launch.engines.torch_native.optim.flat_parameters import OptimizerShard

PIECE_ELEMENTS = 2**28
"""The most elements of a piece: with their master weights and moments up to 4 GiB, of which a step check keeps a copy."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Shards that one kernel call updates.

    Attributes:
        moments: the first and the second moment of each shard, each (elements,).
        held: float32 (). If it is 1, the kernel changes nothing. On the device, so that graphs read its current value.
    """

    shards: Sequence[OptimizerShard]
    moments: Sequence[tuple[torch.Tensor, torch.Tensor]]
    held: torch.Tensor

    def state(self) -> list[torch.Tensor]:
        """Return what the kernel changes: master weights, separate compute weights, and moments."""
        weights = [
            one for shard in self.shards for one in (shard.weights, *(() if shard.is_shared else (shard.compute,)))
        ]
        return weights + [moment for both in self.moments for moment in both]

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same by parameter, with whole master weights of a lean optimizer in place of both halves."""
        for shard, moments in zip(self.shards, self.moments, strict=True):
            for name, place in shard.parts:
                yield f"weight of {name}", shard.masters(place)
                if not shard.is_shared and shard.weights.is_floating_point():
                    yield f"rounded weight of {name}", shard.compute[place]
                for label, moment in zip(("first", "second"), moments, strict=True):
                    yield f"{label} moment of {name}", moment[place]


def make_piece(shards: Sequence[OptimizerShard], dtype: torch.dtype) -> Piece:
    """Return a piece with moments of type ``dtype``, which are zero."""
    moments = [tuple(torch.zeros_like(shard.weights, dtype=dtype) for _ in range(2)) for shard in shards]
    held = torch.zeros((), dtype=torch.float32, device=shards[0].weights.device)
    return Piece(shards, [(first, second) for first, second in moments], held)
