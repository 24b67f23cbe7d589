"""Token dispatchers: they send tokens to the ranks of their experts, and the results back.

E experts are distributed in order over ep ranks, E / ep on each. This rank has T tokens of width H, each with k chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from launch.contract.spec import Model
from launch.engines.torch_native.layers.pointwise import Elementwise
from launch.engines.torch_native.moe.permutation import (
    ExpertPermutation,
    TokenPermuter,
    dropless_permutation,
    expert_capacity,
    local_experts_permutation,
    padded_permutation,
)
from launch.engines.torch_native.moe.router import RepeatedChoice, Routing
from launch.engines.torch_native.parallel import collectives
from launch.engines.torch_native.parallel.process_groups import Group


class Experts(NamedTuple):
    """The experts of this rank."""

    run: Callable[[torch.Tensor, torch.Tensor, ExpertPermutation], torch.Tensor]
    """Maps rows (R, H), weights (R,) and their permutation to rows (R, H)."""
    biases: torch.Tensor | None = None
    """(experts, H), which the dispatcher adds to each expert's result before it is weighted."""


@dataclass(frozen=True)
class LocalDispatcher:
    """The dispatcher for experts that are all on this rank, and the base of the others."""

    model: Model
    elementwise: Elementwise
    group: Group

    def preprocess(self, routing: Routing, repeated: RepeatedChoice | None = None) -> ExpertPermutation:
        """Return the permutation of this rank's tokens over all experts, before they move. It drops tokens as ``repeated`` does.

        The host reads no tensor.
        """
        capacity, weights = expert_capacity(self.model, len(routing.experts)), routing.weights
        if capacity is None:
            return dropless_permutation(routing.experts, routing.tokens_per_expert)
        if repeated is not None:
            weights = repeated.rank_kept_first(weights, len(routing.tokens_per_expert), capacity)
        return padded_permutation(weights, routing.experts, routing.tokens_per_expert, capacity)

    def choices(self, routing: Routing, permutation: ExpertPermutation) -> torch.Tensor:
        """Return the experts of this rank's tokens, int64 (T, k). ``~expert`` stands for an expert that dropped the token."""
        if permutation.capacity is None:
            return routing.experts
        return torch.where(permutation.rows < len(permutation.choices), routing.experts, ~routing.experts)

    def __call__(
        self, tokens: torch.Tensor, routing: Routing, permutation: ExpertPermutation, experts: Experts
    ) -> torch.Tensor:
        """Return the weighted sum over each token's experts: (T, H) -> (T, H).

        Args:
            permutation: the result of :meth:`preprocess`.
        """
        permuter = TokenPermuter(permutation, self.elementwise)
        rows = experts.run(permuter.permute(tokens), permuter.permute_weights(routing.weights), permutation)
        return permuter.combine(rows, routing.weights, experts.biases)


class AllGatherDispatcher(LocalDispatcher):
    """Gathers all tokens on every rank, runs the rows of the rank's own experts, and sums the results by reduce-scatter.

    All shapes are static and the host reads no tensor, so the layer can be captured whole. Memory: ep * T tokens and
    ep * T * min(k, E / ep) rows (the worst case) instead of T * k. Traffic per rank and direction: (ep - 1) * T * H elements to
    gather and as many to reduce-scatter, independent of k.
    """

    def preprocess(self, routing: Routing, repeated: RepeatedChoice | None = None) -> ExpertPermutation:
        count = self.model.num_moe_experts // self.group.size
        chosen = collectives.all_gather(self._kept_experts(routing), self.group, 0)
        return local_experts_permutation(chosen, self.group.rank * count, count)

    def __call__(
        self, tokens: torch.Tensor, routing: Routing, permutation: ExpertPermutation, experts: Experts
    ) -> torch.Tensor:
        all_tokens = collectives.all_gather(tokens, self.group, 0)
        weights = collectives.all_gather(routing.weights, self.group, 0)
        partial = super().__call__(all_tokens, routing._replace(weights=weights), permutation, experts)
        return collectives.reduce_scatter(partial, self.group, 0)

    def _kept_experts(self, routing: Routing) -> torch.Tensor:
        """Return int64 (T, k): the experts of each token, with E in place of an expert that dropped the token."""
        if self.model.moe_expert_capacity_factor is None:
            return routing.experts
        permutation = super().preprocess(routing)
        return torch.where(permutation.rows < len(permutation.choices), routing.experts, self.model.num_moe_experts)


class AllToAllDispatcher(LocalDispatcher):
    """Sends every row to its expert's rank and back.

    Without a capacity, ranks first exchange their row counts, and the host reads them to size its buffers: one synchronization
    per layer. So the experts cannot be captured, but router and preprocessing can. With a capacity, all counts are static and
    the host reads no tensor. Memory: the received rows, about T * k with an even load (with a capacity: E * capacity). Traffic
    per rank and direction: about T * k * H * (ep - 1) / ep elements, there and back.
    """

    def __call__(
        self, tokens: torch.Tensor, routing: Routing, permutation: ExpertPermutation, experts: Experts
    ) -> torch.Tensor:
        permuter = TokenPermuter(permutation, self.elementwise)
        # (ep, E / ep): the number of rows that each rank sends to each expert of this rank.
        arriving = self._arriving(permutation, routing)
        per_rank = permutation.capacity
        if per_rank is None:
            leaving = routing.tokens_per_expert.view(self.group.size, -1)
            # The host waits for the device here.
            sent, received = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()
        else:
            sent = received = [per_rank * self._count] * self.group.size
        rows = collectives.all_to_all(permuter.permute(tokens), self.group, sent, received)
        weights = collectives.all_to_all(
            permuter.permute_weights(routing.weights), self.group, sent, received
        ).unsqueeze(1)
        own = TokenPermuter(self._received_permutation(arriving, sum(received), per_rank), self.elementwise)
        done = experts.run(own.permute(rows), own.permute_weights(weights), own.permutation)
        mixed = own.combine(done, weights, experts.biases)
        return permuter.unpermute(collectives.all_to_all(mixed, self.group, received, sent))

    @property
    def _count(self) -> int:
        return self.model.num_moe_experts // self.group.size

    def _arriving(self, permutation: ExpertPermutation, routing: Routing) -> torch.Tensor:
        """Return int64 (ep, E / ep): the number of rows that each rank sends to each expert of this rank."""
        if permutation.capacity is not None:
            return torch.full(
                (self.group.size, self._count), permutation.capacity, device=routing.tokens_per_expert.device
            )
        counts = [self._count] * self.group.size
        return collectives.all_to_all(routing.tokens_per_expert, self.group, counts, counts).view(self.group.size, -1)

    def _received_permutation(self, arriving: torch.Tensor, rows: int, capacity: int | None) -> ExpertPermutation:
        """Return the permutation that sorts received rows by expert. They arrive sorted by rank, then by expert.

        Args:
            arriving: int64 (ep, E / ep).
        """
        numbers = torch.arange(self._count, device=arriving.device).repeat(self.group.size)
        experts = torch.repeat_interleave(numbers, arriving.flatten(), output_size=rows).unsqueeze(1)
        permutation = dropless_permutation(experts, arriving.sum(0))
        return permutation if capacity is None else permutation._replace(capacity=capacity * self.group.size)


def make_dispatcher(model: Model, elementwise: Elementwise, group: Group, kind: str) -> LocalDispatcher:
    """Return the dispatcher named by ``kind`` (``parallelism.dispatcher``). A single rank always uses the local one."""
    if group.size == 1:
        return LocalDispatcher(model, elementwise, group)
    return (AllGatherDispatcher if kind == "allgather" else AllToAllDispatcher)(model, elementwise, group)
