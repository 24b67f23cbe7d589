"""Tensor-parallel linear layers, embedding and cross-entropy (Megatron-LM, arXiv:1909.08053).

A region is a column-parallel product followed by a row-parallel one. With sequence parallelism (arXiv:2205.05198)
activations outside of regions are sharded along the sequence. Activations have shape (batch, sequence, ...).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from launch.engines.torch_native.parallel import collectives
from launch.engines.torch_native.parallel.process_groups import Group
from launch.engines.torch_native.parallel.sharding import Sharding

SEQUENCE = 1
"""The dimension that sequence parallelism shards."""


@dataclass(frozen=True)
class TensorParallel:
    """How activations enter and leave a tensor-parallel region."""

    group: Group = field(default_factory=Group)
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def outside_sharding(self) -> Sharding:
        """The sharding of a replicated parameter outside of regions.

        With sequence parallelism its gradient is partial: it covers this rank's shard of the sequence.
        """
        return Sharding(partial=self.sequence_parallel and self.size > 1)

    @property
    def inside_sharding(self) -> Sharding:
        """The sharding of a replicated parameter that each rank applies to its own heads or tokens. Its gradient is partial."""
        return Sharding(partial=self.size > 1)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence: (batch, sequence or this rank's shard, width) -> (batch, sequence, width)."""
        if self.sequence_parallel:
            return collectives.all_gather(x, self.group, SEQUENCE)
        return collectives.copy_to_group(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks: (batch, sequence, width) -> (batch, sequence or this rank's shard, width)."""
        if self.sequence_parallel:
            return collectives.reduce_scatter(x, self.group, SEQUENCE)
        return collectives.reduce_from_group(x, self.group)

    def scatter_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the sequence: (batch, sequence / tp, width)."""
        return x if self.sequence_parallel else collectives.scatter_to_group(x, self.group, SEQUENCE)

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence, (batch, sequence, width): the transpose of :meth:`scatter_tokens`."""
        return x if self.sequence_parallel else collectives.gather_from_group(x, self.group, SEQUENCE)


class ColumnParallelLinear(nn.Linear):
    """A linear layer with sharded outputs: (batch, sequence, inputs) -> (batch, sequence, sum(sections) / tp).

    Each of ``sections`` is split over the ranks separately: queries, keys and values.
    """

    def __init__(self, inputs: int, sections: tuple[int, ...], bias: bool, tp: TensorParallel) -> None:
        super().__init__(inputs, sum(sections) // tp.size, bias)
        self.tp = tp
        self.shardings = dict.fromkeys(("weight", "bias") if bias else ("weight",), Sharding("tp", 0, sections))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.tp.enter(x))


class RowParallelLinear(nn.Linear):
    """A linear layer with sharded inputs: (batch, sequence, inputs / tp) -> (batch, sequence or this rank's shard, outputs).

    The bias is added once, to the sum over ranks.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__(inputs // tp.size, outputs, bias)
        self.tp = tp
        self.shardings = {"weight": Sharding("tp", 1)} | ({"bias": tp.outside_sharding} if bias else {})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return super().forward(x)
        total = self.tp.leave(nn.functional.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(nn.Embedding):
    """An embedding that is sharded over the vocabulary. Each rank looks up the tokens of its shard."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__(vocab_size // tp.size, hidden_size)
        self.tp = tp
        self.shardings = {"weight": Sharding("tp", 0)}

    def reset_parameters(self) -> None:
        """Do nothing, because weights are drawn once the model is complete.

        Normal numbers on the meta device would make PyTorch load Dynamo, which takes as long as the rest of its import.
        """

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (batch, sequence) -> (batch, sequence or this rank's shard, hidden_size)."""
        if self.tp.size == 1:
            return super().forward(tokens)
        own, inside = _own_entries(tokens, self.num_embeddings, self.tp.group)
        return self.tp.leave(super().forward(own).masked_fill(~inside.unsqueeze(-1), 0.0))


def vocab_parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the mean cross-entropy over all tokens in nats, shape (), on every rank. Logits are never gathered.

    Args:
        logits: (batch, sequence, vocab_size / tp).
        targets: int64 (batch, sequence), in the whole vocabulary.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # Subtract the maximum over the whole vocabulary to keep exp from overflowing.
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group.process_group)
    logits = logits - largest.unsqueeze(-1)
    total = collectives.reduce_from_group(logits.exp().sum(-1), group)
    own, inside = _own_entries(targets, logits.shape[-1], group)
    picked = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0.0)
    return (total.log() - collectives.reduce_from_group(picked, group)).mean()


def _own_entries(tokens: torch.Tensor, count: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Translate ``tokens``, int64 (...), into indices of this rank's ``count`` entries.

    Return the indices (0 for entries of other ranks) and a bool mask of this rank's entries, both (...).
    """
    own = tokens - group.rank * count
    inside = (own >= 0) & (own < count)
    return own.masked_fill(~inside, 0), inside
