"""A mixture of experts: route, lay the tokens out by expert, multiply in groups, put back."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, cast

import torch
from torch import nn

from launch.engines.torch_native.dispatch import Combine, Dispatch, How, Spread, capacity, dispatch
from launch.engines.torch_native.elementwise import Elementwise
from launch.engines.torch_native.grouped_mm import grouped_mm
from launch.engines.torch_native.mlp import Mlp
from launch.engines.torch_native.router import Router
from launch.spec import Model


class Routed(NamedTuple):
    """What a mixture of experts says of its routing."""

    loss: torch.Tensor
    """The router's own losses, a scalar."""
    choices: torch.Tensor
    """How many tokens chose each expert: int64 of shape (experts,)."""


class MixtureOfExperts(nn.Module):
    """Gated experts behind a top-k router, and a shared expert where the model has one.

    Dropless without ``moe_expert_capacity_factor``; with it, every expert takes its capacity and the rest is dropped.
    """

    def __init__(self, model: Model, elementwise: Elementwise) -> None:
        super().__init__()
        experts, hidden, inner = model.num_moe_experts, model.hidden_size, model.moe_ffn_hidden_size
        self.model = model
        self.elementwise = elementwise
        self.activation = getattr(elementwise, f"weighted_{model.activation}")
        self.router = Router(model)
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * inner))
        self.down = nn.Parameter(torch.empty(experts, inner, hidden))
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * inner)) if model.add_bias_linear else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden)) if model.add_bias_linear else None
        shared = model.moe_shared_expert_ffn_hidden_size
        self.shared = Mlp(model, shared, elementwise) if shared else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routed]:
        """(batch, sequence, hidden) -> the same."""
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        plan = dispatch(routing, capacity(self.model, len(tokens)))
        how = How(self.elementwise, plan.padded)
        rows = _spread(tokens, plan.tokens, plan.rows, how)
        weights = _spread(routing.weights.flatten(), plan.choices, plan.rows.view(-1, 1), how)
        mixed = cast(Any, Combine).apply(self._experts(rows, weights, plan), plan.rows, plan.tokens, how)
        if self.shared is not None:
            mixed = mixed + self.shared(tokens)
        return mixed.view_as(x), Routed(routing.loss, routing.choices)

    def _experts(self, rows: torch.Tensor, weights: torch.Tensor, plan: Dispatch) -> torch.Tensor:
        """Each row through its expert, times its weight: (R, hidden) -> the same.

        The weight is applied within, where rows are narrower, and so the second bias is weighted by itself.
        """
        member = self._membership(plan, rows.dtype)
        inner = self.activation(_product(rows, self.gate_up, self.gate_up_bias, member, plan), weights)
        weighted = None if member is None else (member * weights.unsqueeze(1)).to(rows.dtype)
        return _product(inner, self.down, self.down_bias, weighted, plan)

    def _membership(self, plan: Dispatch, dtype: torch.dtype) -> Optional[torch.Tensor]:
        """(R, experts): 1 where a row is an expert's. A product with it adds biases, and its gradient sums them up
        in a fixed order, which indexing by expert would not."""
        if self.gate_up_bias is None:
            return None
        row = torch.arange(len(plan.tokens), device=plan.ends.device).unsqueeze(1)
        starts = torch.cat((plan.ends.new_zeros(1), plan.ends[:-1]))
        return ((row >= starts) & (row < plan.ends)).to(dtype)


def _spread(x: torch.Tensor, taken: torch.Tensor, places: torch.Tensor, how: How) -> torch.Tensor:
    return cast(torch.Tensor, cast(Any, Spread).apply(x, taken, places, how))


def _product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    member: Optional[torch.Tensor],
    plan: Dispatch,
) -> torch.Tensor:
    if plan.padded:
        product = torch.bmm(rows.view(len(weight), -1, rows.shape[1]), weight).flatten(0, 1)
    else:
        product = grouped_mm(rows, weight, plan.ends)
    return product if bias is None or member is None else torch.addmm(product, member, bias)
