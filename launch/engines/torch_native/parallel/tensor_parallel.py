"""Linear layers, embedding and cross-entropy over the ranks of a tensor-parallel group.

Shoeybi et al., Megatron-LM (arXiv:1909.08053): outputs are split in the first of two products and inputs in the second,
so that one sum over the ranks ends both. With sequence parallelism (Korthikanti et al., arXiv:2205.05198) what lies
between such pairs is split along the sequence, and the sum becomes a reduce-scatter with an all-gather before the next
pair. Activations are of shape (batch, sequence, ...).
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
"""The dimension that sequence parallelism splits."""


@dataclass(frozen=True)
class TensorParallel:
    """How activations enter and leave a pair of products."""

    group: Group = field(default_factory=Group)
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def beside(self) -> Sharding:
        """Of parameters between pairs of products, which every rank holds whole: with sequence parallelism each rank has
        the gradient of its own stretch of the sequence."""
        return Sharding(partial=self.sequence_parallel and self.size > 1)

    @property
    def within(self) -> Sharding:
        """Of parameters that every rank holds whole and applies to its own part of what is split."""
        return Sharding(partial=self.size > 1)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """To the whole sequence, of which each rank computes its part of the outputs."""
        if self.sequence_parallel:
            return collectives.gather(x, self.group, SEQUENCE)
        return collectives.copy_to_group(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, or this rank's stretch of it."""
        if self.sequence_parallel:
            return collectives.reduce_scatter(x, self.group, SEQUENCE)
        return collectives.reduce_from_group(x, self.group)

    def own_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's stretch of the sequence."""
        return x if self.sequence_parallel else collectives.scatter_to_group(x, self.group, SEQUENCE)

    def all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """The transpose of :meth:`own_tokens`."""
        return x if self.sequence_parallel else collectives.gather_from_group(x, self.group, SEQUENCE)


class ColumnParallelLinear(nn.Linear):
    """``sections`` are stretches of outputs that are each split over the ranks: queries, keys and values."""

    def __init__(self, inputs: int, sections: tuple[int, ...], bias: bool, tp: TensorParallel) -> None:
        super().__init__(inputs, sum(sections) // tp.size, bias)
        self.tp = tp
        self.shardings = dict.fromkeys(("weight", "bias") if bias else ("weight",), Sharding("tp", 0, sections))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.tp.enter(x))


class RowParallelLinear(nn.Linear):
    """The bias is added once, to the sum."""

    def __init__(self, inputs: int, outputs: int, bias: bool, tp: TensorParallel) -> None:
        super().__init__(inputs // tp.size, outputs, bias)
        self.tp = tp
        self.shardings = {"weight": Sharding("tp", 1)} | ({"bias": tp.beside} if bias else {})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return super().forward(x)
        total = self.tp.leave(nn.functional.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class VocabParallelEmbedding(nn.Embedding):
    """Each rank holds a stretch of the vocabulary and looks up what lies in it."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__(vocab_size // tp.size, hidden_size)
        self.tp = tp
        self.shardings = {"weight": Sharding("tp", 0)}

    def reset_parameters(self) -> None:
        """Nothing: weights are drawn once the model is whole. To draw normal numbers on the meta device PyTorch loads
        Dynamo, which takes as long as all the rest of it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 of shape (batch, sequence) -> (batch, sequence or this rank's stretch of it, hidden)"""
        if self.tp.size == 1:
            return super().forward(tokens)
        own, inside = _own_entries(tokens, self.num_embeddings, self.tp.group)
        return self.tp.leave(super().forward(own).masked_fill(~inside.unsqueeze(-1), 0.0))


def vocab_parallel_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, group: Group) -> torch.Tensor:
    """The mean over all tokens, in nats; logits are never gathered. Every rank returns it.

    Args:
        logits: (batch, sequence, this rank's stretch of the vocabulary).
        targets: int64 of shape (batch, sequence), in the whole vocabulary.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group.process_group)
    logits = logits - largest.unsqueeze(-1)
    total = collectives.reduce_from_group(logits.exp().sum(-1), group)
    own, inside = _own_entries(targets, logits.shape[-1], group)
    picked = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0.0)
    return (total.log() - collectives.reduce_from_group(picked, group)).mean()


def _own_entries(tokens: torch.Tensor, count: int, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of this rank's stretch of ``count``, 0 for those of other ranks; and which are its own."""
    own = tokens - group.rank * count
    inside = (own >= 0) & (own < count)
    return own.masked_fill(~inside, 0), inside
