"""How tokens reach the ranks of their experts and come back: within a rank, or over an expert-parallel group.

E experts lie on ep ranks, E / ep each, in order. T tokens of width H are this rank's own, k the experts that each
chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from launch.contract.spec import Model
from launch.engines.torch_native.layers.pointwise import Elementwise
from launch.engines.torch_native.moe.permutation import (
    ExpertPermutation,
    Moves,
    capacity_of,
    dropless,
    of_some_experts,
    padded,
)
from launch.engines.torch_native.moe.router import Routing
from launch.engines.torch_native.parallel import collectives
from launch.engines.torch_native.parallel.process_groups import Group

Experts = Callable[[torch.Tensor, torch.Tensor, ExpertPermutation], torch.Tensor]
"""Rows (R, H), their weights (R,) and their layout -> rows (R, H)."""


class TokenDispatcher(Protocol):
    def prepare(self, routing: Routing) -> ExpertPermutation:
        """What can be said of the rows beforehand. The host reads nothing."""

    def __call__(
        self, tokens: torch.Tensor, routing: Routing, layout: ExpertPermutation, experts: Experts
    ) -> torch.Tensor:
        """(T, H) -> (T, H): each token's weighted sum over its experts. ``layout`` is what :meth:`prepare` gave."""


@dataclass(frozen=True)
class LocalDispatcher:
    """Every expert is on this rank."""

    model: Model
    elementwise: Elementwise

    def prepare(self, routing: Routing) -> ExpertPermutation:
        return _own_layout(self.model, routing)

    def __call__(
        self, tokens: torch.Tensor, routing: Routing, layout: ExpertPermutation, experts: Experts
    ) -> torch.Tensor:
        moves = Moves(layout, self.elementwise)
        rows = experts(moves.permute(tokens), moves.spread_weights(routing.weights), layout)
        return moves.unpermute(rows)


@dataclass(frozen=True)
class AllGatherDispatcher:
    """Every rank is sent all tokens, takes the rows of its own experts, and all results are summed up.

    All shapes are known beforehand and the host reads nothing: the layer can be captured whole. Memory: ep * T tokens
    and ep * T * min(k, E / ep) rows, the most that a rank's experts can be chosen, instead of T * k. Traffic a rank and
    direction: (ep - 1) * T * H elements to gather and as many to reduce-scatter, whatever k is.
    """

    model: Model
    elementwise: Elementwise
    group: Group

    def prepare(self, routing: Routing) -> ExpertPermutation:
        count = self.model.num_moe_experts // self.group.size
        chosen = collectives.gather(self._kept(routing), self.group, 0)
        return of_some_experts(chosen, self.group.rank * count, count)

    def __call__(
        self, tokens: torch.Tensor, routing: Routing, layout: ExpertPermutation, experts: Experts
    ) -> torch.Tensor:
        everybodys = collectives.gather(tokens, self.group, 0)
        weights = collectives.gather(routing.weights, self.group, 0)
        moves = Moves(layout, self.elementwise)
        rows = experts(moves.permute(everybodys), moves.spread_weights(weights), layout)
        return collectives.reduce_scatter(moves.unpermute(rows), self.group, 0)

    def _kept(self, routing: Routing) -> torch.Tensor:
        """The experts of each token; beyond the last one where it found no room."""
        if self.model.moe_expert_capacity_factor is None:
            return routing.experts
        layout = _own_layout(self.model, routing)
        return torch.where(layout.rows < len(layout.choices), routing.experts, self.model.num_moe_experts)


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Every row is sent to its expert's rank and back.

    Dropless, ranks first tell each other how many rows they send, and the host reads it to size what is received: one
    synchronisation a layer, so that the expert part cannot be captured (the router and the layout can). Padded to
    capacity all counts are known and nothing is read. Memory: the rows that arrive, about T * k where the load is even
    (padded: E / ep * ep * capacity). Traffic a rank and direction: about T * k * H * (ep - 1) / ep elements there and as
    many back.
    """

    model: Model
    elementwise: Elementwise
    group: Group

    def prepare(self, routing: Routing) -> ExpertPermutation:
        return _own_layout(self.model, routing)

    def __call__(
        self, tokens: torch.Tensor, routing: Routing, layout: ExpertPermutation, experts: Experts
    ) -> torch.Tensor:
        moves = Moves(layout, self.elementwise)
        # What every rank sends to every expert of this rank: (ep, E / ep).
        arriving = self._arriving(layout, routing)
        per_rank = layout.capacity
        if per_rank is None:
            leaving = routing.choices.view(self.group.size, -1)
            sent, received = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()
        else:
            sent = received = [per_rank * self._count] * self.group.size
        rows = collectives.all_to_all(moves.permute(tokens), self.group, sent, received)
        weights = collectives.all_to_all(moves.spread_weights(routing.weights), self.group, sent, received)
        here = Moves(self._layout_here(arriving, sum(received), per_rank), self.elementwise)
        done = experts(here.permute(rows), here.spread_weights(weights.unsqueeze(1)), here.layout)
        return moves.unpermute(collectives.all_to_all(here.unpermute(done), self.group, received, sent))

    @property
    def _count(self) -> int:
        return self.model.num_moe_experts // self.group.size

    def _arriving(self, layout: ExpertPermutation, routing: Routing) -> torch.Tensor:
        if layout.capacity is not None:
            return torch.full((self.group.size, self._count), layout.capacity, device=routing.choices.device)
        counts = [self._count] * self.group.size
        return collectives.all_to_all(routing.choices, self.group, counts, counts).view(self.group.size, -1)

    def _layout_here(self, arriving: torch.Tensor, rows: int, capacity: int | None) -> ExpertPermutation:
        """Rows come sorted by rank, then by expert; experts want them sorted by expert."""
        numbers = torch.arange(self._count, device=arriving.device).repeat(self.group.size)
        experts = torch.repeat_interleave(numbers, arriving.flatten(), output_size=rows).unsqueeze(1)
        layout = dropless(experts, arriving.sum(0))
        return layout if capacity is None else layout._replace(capacity=capacity * self.group.size)


def make_dispatcher(model: Model, elementwise: Elementwise, group: Group, kind: str) -> TokenDispatcher:
    """``kind`` is ``parallelism.dispatcher``; where the experts are all here there is nothing to choose."""
    if group.size == 1:
        return LocalDispatcher(model, elementwise)
    return (AllGatherDispatcher if kind == "allgather" else AllToAllDispatcher)(model, elementwise, group)


def _own_layout(model: Model, routing: Routing) -> ExpertPermutation:
    """Of this rank's tokens over all experts."""
    capacity = capacity_of(model, len(routing.experts))
    if capacity is None:
        return dropless(routing.experts, routing.choices)
    return padded(routing.weights, routing.experts, routing.choices, capacity)
