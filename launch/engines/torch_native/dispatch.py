"""How the tokens of a micro-batch are laid out for their experts, and how the results come back.

T tokens choose topk experts each. A dropless dispatch sorts all T * topk choices by expert. A padded one gives each
expert as many rows as its capacity: choices beyond it are dropped, the least probable ones first, and rows that no
choice fills are zero. Every shape follows from the configuration alone and nothing is read by the host, so that the
layer can be captured.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional

import torch

from launch.engines.torch_native.elementwise import Elementwise
from launch.engines.torch_native.router import Routing
from launch.spec import Model


class Dispatch(NamedTuple):
    """R rows, in order of their experts. A number beyond the last stands for a row of zeros."""

    tokens: torch.Tensor
    """The token of each row, (R,)."""
    choices: torch.Tensor
    """The choice of each row, (R,): token * topk + which of its experts."""
    rows: torch.Tensor
    """The row of each choice, (T, topk)."""
    ends: torch.Tensor
    """Where each expert's rows end, int32 of shape (experts,)."""
    padded: bool


def capacity(model: Model, tokens: int) -> Optional[int]:
    """Rows an expert takes, None where none is dropped: its even share of the choices times the capacity factor
    (Megatron-Core's ``get_capacity``)."""
    factor = model.moe_expert_capacity_factor
    return None if factor is None else math.ceil(tokens * model.moe_router_topk / model.num_moe_experts * factor)


def dispatch(routing: Routing, limit: Optional[int]) -> Dispatch:
    """``limit`` is the capacity of an expert; None is dropless."""
    return _dropless(routing) if limit is None else _padded(routing, limit)


def _dropless(routing: Routing) -> Dispatch:
    choices = routing.experts.flatten().sort(stable=True).indices
    ends = routing.choices.cumsum(0, dtype=torch.int32)
    topk = routing.experts.shape[1]
    return Dispatch(choices // topk, choices, _inverse(choices).view_as(routing.experts), ends, padded=False)


def _padded(routing: Routing, limit: int) -> Dispatch:
    experts, topk = routing.experts.flatten(), routing.experts.shape[1]
    by_weight = routing.weights.detach().flatten().sort(descending=True, stable=True).indices
    order = by_weight[experts[by_weight].sort(stable=True).indices]
    ends = routing.choices.cumsum(0)
    starts = ends - routing.choices
    slot = torch.arange(limit, device=experts.device)
    place = (starts.unsqueeze(1) + slot).clamp(max=len(experts) - 1)
    choices = torch.where(slot < routing.choices.unsqueeze(1), order[place], len(experts)).flatten()
    rank = _inverse(order) - starts[experts]
    rows = torch.where(rank < limit, experts * limit + rank, len(choices))
    full = torch.arange(1, len(ends) + 1, device=experts.device, dtype=torch.int32) * limit
    return Dispatch(choices // topk, choices, rows.view_as(routing.experts), full, padded=True)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class Spread(torch.autograd.Function):
    """Take rows of ``x`` by number. Indexing's own gradient adds rows up, slowly and in no fixed order; here it is known
    where each row of ``x`` went, and its gradient is gathered from there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, taken: torch.Tensor, places: torch.Tensor, how: How) -> torch.Tensor:
        """(N, width) -> (R, width). ``taken`` is of shape (R,), ``places`` of shape (N, times that each is taken)."""
        ctx.save_for_backward(places)
        ctx.how = how
        return how.take(x, taken)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return ctx.how.gather_sum(gradients[0], places), None, None, None


class Combine(torch.autograd.Function):
    """The transpose of :class:`Spread`: of each group of ``places`` the sum of the rows named."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor, taken: torch.Tensor, how: How) -> torch.Tensor:
        """(R, width) -> (N, width)"""
        ctx.save_for_backward(taken)
        ctx.how = how
        return how.gather_sum(rows, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (taken,) = ctx.saved_tensors
        return ctx.how.take(gradients[0], taken), None, None, None


class How(NamedTuple):
    """The two directions of a dispatch; ``padded`` where a number may name the row of zeros behind the last."""

    elementwise: Elementwise
    padded: bool

    def take(self, x: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        return self._extended(x)[taken]

    def gather_sum(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.elementwise.gather_sum(self._extended(rows), places)

    def _extended(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x.new_zeros(1, *x.shape[1:]))) if self.padded else x
