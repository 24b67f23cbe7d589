"""How the tokens of a micro-batch are laid out for the experts of one rank, and how the results come back.

T tokens choose topk experts each. A dropless layout sorts the choices by expert. A padded one gives each expert as many
rows as its capacity: choices beyond it are dropped, the least probable ones first, and rows that no choice fills are
zero. Every shape follows from the configuration alone and nothing is read by the host, so that the layer can be
captured.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch

from launch.contract.spec import Model
from launch.engines.torch_native.layers.pointwise import Elementwise


class ExpertPermutation(NamedTuple):
    """R rows, in order of their experts. A number beyond the last stands for a row of zeros."""

    tokens: torch.Tensor
    """The token of each row, (R,)."""
    choices: torch.Tensor
    """The choice of each row, (R,): token * topk + which of its experts."""
    rows: torch.Tensor
    """The row of each choice, (T, topk)."""
    ends: torch.Tensor
    """Where each expert's rows end, int32 of shape (experts,); what lies behind the last is nobody's."""
    capacity: int | None
    """Rows of each expert, where all have as many."""
    holes: bool
    """Whether some row has no choice, or some choice no row."""


def capacity_of(model: Model, tokens: int) -> int | None:
    """Rows an expert takes, None where none is dropped: its even share of the choices times the capacity factor
    (Megatron-Core's ``get_capacity``)."""
    factor = model.moe_expert_capacity_factor
    return None if factor is None else math.ceil(tokens * model.moe_router_topk / model.num_moe_experts * factor)


def dropless(experts: torch.Tensor, choices: torch.Tensor) -> ExpertPermutation:
    """Every choice has a row.

    Args:
        experts: int64 of shape (T, topk).
        choices: how often each expert was chosen, int64 of shape (experts,).
    """
    order = experts.flatten().sort(stable=True).indices
    ends = choices.cumsum(0, dtype=torch.int32)
    return ExpertPermutation(
        order // experts.shape[1], order, _inverse(order).view_as(experts), ends, capacity=None, holes=False
    )


def of_some_experts(experts: torch.Tensor, first: int, count: int) -> ExpertPermutation:
    """Choices of the experts from ``first`` on have a row, those of all others none. There are rows for the case that
    every token chooses as many of these experts as it can."""
    topk = experts.shape[1]
    own = experts.flatten() - first
    own = torch.where((own >= 0) & (own < count), own, count)
    sorted_experts, order = own.sort(stable=True)
    numbers = torch.arange(count, device=experts.device)
    ends = torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
    length = experts.shape[0] * min(topk, count)
    choices = torch.where(torch.arange(length, device=experts.device) < ends[-1], order[:length], len(order))
    rows = torch.where(own < count, _inverse(order), length)
    return ExpertPermutation(choices // topk, choices, rows.view_as(experts), ends, capacity=None, holes=True)


def padded(weights: torch.Tensor, experts: torch.Tensor, choices: torch.Tensor, capacity: int) -> ExpertPermutation:
    """Every expert has ``capacity`` rows, for the choices of most weight.

    Args:
        weights: (T, topk), as ``experts``.
    """
    chosen, topk = experts.flatten(), experts.shape[1]
    by_weight = weights.detach().flatten().sort(descending=True, stable=True).indices
    order = by_weight[chosen[by_weight].sort(stable=True).indices]
    starts = choices.cumsum(0) - choices
    slot = torch.arange(capacity, device=experts.device)
    place = (starts.unsqueeze(1) + slot).clamp(max=len(chosen) - 1)
    of_row = torch.where(slot < choices.unsqueeze(1), order[place], len(chosen)).flatten()
    rank = _inverse(order) - starts[chosen]
    rows = torch.where(rank < capacity, chosen * capacity + rank, len(of_row))
    ends = torch.arange(1, len(choices) + 1, device=experts.device, dtype=torch.int32) * capacity
    return ExpertPermutation(of_row // topk, of_row, rows.view_as(experts), ends, capacity, holes=True)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Moves(NamedTuple):
    """To rows and back, along one layout."""

    layout: ExpertPermutation
    elementwise: Elementwise

    def permute(self, tokens: torch.Tensor) -> torch.Tensor:
        """(T, width) -> (R, width)"""
        return self._gather(_Spread, tokens, self.layout.tokens, self.layout.rows)

    def spread_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """(T, topk) -> (R,)"""
        return self._gather(_Spread, weights.flatten(), self.layout.choices, self.layout.rows.view(-1, 1))

    def unpermute(self, rows: torch.Tensor) -> torch.Tensor:
        """(R, width) -> (T, width): each token's rows summed up."""
        return self._gather(_Combine, rows, self.layout.tokens, self.layout.rows)

    def take(self, x: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        return self._extended(x)[taken]

    def gather_sum(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.elementwise.gather_sum(self._extended(x), places)

    def _extended(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x.new_zeros(1, *x.shape[1:]))) if self.layout.holes else x

    def _gather(
        self, function: type[torch.autograd.Function], x: torch.Tensor, taken: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        return cast(torch.Tensor, cast(Any, function).apply(x, taken, places, self))


class _Spread(torch.autograd.Function):
    """Take rows of ``x`` by number. Indexing's own gradient adds rows up, slowly and in no fixed order; here it is known
    where each row of ``x`` went, and its gradient is gathered from there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, taken: torch.Tensor, places: torch.Tensor, moves: Moves) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.moves = moves
        return moves.take(x, taken)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return ctx.moves.gather_sum(gradients[0], places), None, None, None


class _Combine(torch.autograd.Function):
    """The transpose of :class:`_Spread`: of each group of ``places`` the sum of the rows named."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, taken: torch.Tensor, places: torch.Tensor, moves: Moves) -> torch.Tensor:
        ctx.save_for_backward(taken)
        ctx.moves = moves
        return moves.gather_sum(x, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (taken,) = ctx.saved_tensors
        return ctx.moves.take(gradients[0], taken), None, None, None
