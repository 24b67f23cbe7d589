"""Token permutation: from tokens to rows sorted by expert, and back.

Each of T tokens chooses topk experts. Every shape follows from the configuration, and the host reads no tensor, so the
permutation can be captured.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch

from launch.contract.spec import Model
from launch.engines.torch_native.layers.pointwise import Elementwise


class ExpertPermutation(NamedTuple):
    """R rows sorted by expert, for T * topk choices. An index after the last row or token stands for zeros."""

    tokens: torch.Tensor
    """int64 (R,): the token of each row."""
    choices: torch.Tensor
    """int64 (R,): the choice of each row, which is token * topk + its position among the token's experts."""
    rows: torch.Tensor
    """int64 (T, topk): the row of each choice."""
    ends: torch.Tensor
    """int32 (experts,): the end of each expert's rows. Rows after the last end belong to no expert."""
    capacity: int | None
    """Rows of each expert, if all have the same number; otherwise None."""
    holes: bool
    """Whether some rows may have no choice, or some choices no row."""

    def experts(self) -> torch.Tensor:
        """Return the expert of each row, int32 (R,); the number of experts for a row of none."""
        return self.experts_of(torch.arange(len(self.tokens), dtype=torch.int32, device=self.ends.device))

    def experts_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the expert of each of ``rows``, int32 (...); the number of experts for a row of none."""
        return torch.searchsorted(self.ends, rows, right=True, out_int32=True)


def expert_capacity(model: Model, tokens: int) -> int | None:
    """Return the rows per expert: an even share of the choices times the capacity factor; None without token dropping.

    The formula is that of Megatron-Core's ``get_capacity``.
    """
    factor = model.moe_expert_capacity_factor
    return None if factor is None else math.ceil(tokens * model.moe_router_topk / model.num_moe_experts * factor)


def dropless_permutation(experts: torch.Tensor, tokens_per_expert: torch.Tensor) -> ExpertPermutation:
    """Return the permutation that gives every choice a row.

    Args:
        experts: int64 (T, topk).
        tokens_per_expert: int64 (experts,).
    """
    order = _order(experts.flatten())
    ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
    return ExpertPermutation(
        order // experts.shape[1], order, _inverse(order).view_as(experts), ends, capacity=None, holes=False
    )


def local_experts_permutation(experts: torch.Tensor, first: int, count: int) -> ExpertPermutation:
    """Return the permutation that gives rows only to choices of the ``count`` experts from ``first`` on.

    There are enough rows for the worst case, in which every token chooses as many of these experts as it can.

    Args:
        experts: int64 (T, topk).
    """
    topk = experts.shape[1]
    own = experts.flatten() - first
    own = torch.where((own >= 0) & (own < count), own, count)
    order = _order(own)
    numbers = torch.arange(count, device=experts.device)
    ends = torch.searchsorted(own[order], numbers, right=True, out_int32=True)
    length = experts.shape[0] * min(topk, count)
    choices = torch.where(torch.arange(length, device=experts.device) < ends[-1], order[:length], len(order))
    rows = torch.where(own < count, _inverse(order), length)
    return ExpertPermutation(choices // topk, choices, rows.view_as(experts), ends, capacity=None, holes=True)


def padded_permutation(
    weights: torch.Tensor, experts: torch.Tensor, tokens_per_expert: torch.Tensor, capacity: int
) -> ExpertPermutation:
    """Return the permutation that gives every expert ``capacity`` rows. It drops excess choices, those of least weight.

    Unused rows are zero.

    Args:
        weights: (T, topk).
        experts: int64 (T, topk).
        tokens_per_expert: int64 (experts,).
    """
    chosen, topk = experts.flatten(), experts.shape[1]
    by_weight = weights.detach().flatten().sort(descending=True, stable=True).indices
    order = by_weight[_order(chosen[by_weight])]
    starts = tokens_per_expert.cumsum(0) - tokens_per_expert
    slot = torch.arange(capacity, device=experts.device)
    position = (starts.unsqueeze(1) + slot).clamp(max=len(chosen) - 1)
    choices = torch.where(slot < tokens_per_expert.unsqueeze(1), order[position], len(chosen)).flatten()
    rank = _inverse(order) - starts[chosen]
    rows = torch.where(rank < capacity, chosen * capacity + rank, len(choices))
    ends = torch.arange(1, len(tokens_per_expert) + 1, device=experts.device, dtype=torch.int32) * capacity
    return ExpertPermutation(choices // topk, choices, rows.view_as(experts), ends, capacity, holes=True)


def _order(experts: torch.Tensor) -> torch.Tensor:
    """Return the order that sorts experts, int64 (n,), and keeps equal ones in order. CUDA passes over each byte of a key."""
    return experts.to(torch.int16).sort(stable=True).indices


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a permutation, int64 (n,)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class TokenPermuter(NamedTuple):
    """Permutes tokens to rows and back."""

    permutation: ExpertPermutation
    elementwise: Elementwise

    def permute(self, tokens: torch.Tensor) -> torch.Tensor:
        """(T, width) -> (R, width)."""
        return self._move(tokens, self.permutation.tokens, self.permutation.rows, sums=False)

    def permute_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """(T, topk) -> (R,)."""
        return self._move(weights.flatten(), self.permutation.choices, self.permutation.rows.view(-1, 1), sums=False)

    def unpermute(self, rows: torch.Tensor) -> torch.Tensor:
        """(R, width) -> (T, width): sum the rows of each token."""
        return self._move(rows, self.permutation.tokens, self.permutation.rows, sums=True)

    def combine(self, rows: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
        """Sum the rows of each token, (R, width), and its experts' biases times their weights. Return (T, width).

        Args:
            weights: (T, topk).
            biases: (experts, width).
        """
        mixed = self.unpermute(rows)
        if biases is None:
            return mixed
        experts = self.permutation.experts_of(self.permutation.rows.int()).unsqueeze(-1)
        numbers = torch.arange(len(biases), device=biases.device)
        # One of a token's experts at most has each number.
        shares = torch.where(experts == numbers, weights.unsqueeze(-1), 0.0).sum(1)
        return mixed.addmm_(shares.to(mixed.dtype), biases)

    def compute(self, x: torch.Tensor, taken: torch.Tensor, places: torch.Tensor, sums: bool) -> torch.Tensor:
        """Select the rows ``taken`` of ``x``, or sum the rows of each group of ``places``.

        Args:
            x: (n, width).
            taken: without ``sums``, the row of each result: indices (m,).
            places: with ``sums``, the rows of each result: indices (groups, size).
        """
        # Add a row of zeros, to which indices after the last row refer.
        extended = torch.cat((x, x.new_zeros(1, *x.shape[1:]))) if self.permutation.holes else x
        return self.elementwise.gather_sum(extended, places) if sums else extended[taken]

    def _move(self, x: torch.Tensor, taken: torch.Tensor, places: torch.Tensor, sums: bool) -> torch.Tensor:
        return cast(torch.Tensor, cast(Any, _Move).apply(x, taken, places, self, sums))


class _Move(torch.autograd.Function):
    """Select rows of ``x`` by index, or sum them. Each operation is the gradient of the other.

    The gradient of PyTorch's indexing adds rows slowly and in no fixed order. Here ``places`` has the rows to which each row of
    ``x`` went, and the gradient gathers them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, taken: torch.Tensor, places: torch.Tensor, permuter: TokenPermuter, sums: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(taken, places)
        ctx.permuter, ctx.sums = permuter, sums
        return permuter.compute(x, taken, places, sums)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.permuter.compute(gradients[0], *ctx.saved_tensors, not ctx.sums), None, None, None, None
