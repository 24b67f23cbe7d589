"""A mixture of experts: route, bring tokens to their experts, multiply in groups, bring them back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.layers.mlp import Mlp
from launch.engines.torch_native.moe.grouped_mm import grouped_mm
from launch.engines.torch_native.moe.permutation import ExpertPermutation
from launch.engines.torch_native.moe.router import Router, Routing
from launch.engines.torch_native.moe.token_dispatcher import make_dispatcher
from launch.engines.torch_native.parallel.sharding import Sharding


class Routed(NamedTuple):
    """What a mixture of experts says of its routing."""

    loss: torch.Tensor
    """The router's own losses over this rank's tokens, a scalar; the sum over a tensor-parallel group is the loss."""
    choices: torch.Tensor
    """How many of this rank's tokens chose each expert: int64 of shape (experts,)."""


class Prepared(NamedTuple):
    """What is known before any token is moved: where each goes, what the shared expert says, and how rows lie."""

    routing: Routing
    shared: torch.Tensor | None
    layout: ExpertPermutation


class MixtureOfExperts(nn.Module):
    """Gated experts behind a top-k router, and a shared expert where the model has one.

    Dropless without ``moe_expert_capacity_factor``; with it, every expert takes its capacity and the rest is dropped.
    Experts are split over ``ep`` and never over the tensor-parallel group, whose ranks route a stretch of the sequence
    each.
    """

    def __init__(self, blueprint: BuildContext) -> None:
        super().__init__()
        model, elementwise, tp, ep = blueprint.model, blueprint.elementwise, blueprint.tp, blueprint.ep
        experts, hidden, inner = model.num_moe_experts // ep.size, model.hidden_size, model.moe_ffn_hidden_size
        self.tp = tp
        self.activation = getattr(elementwise, f"weighted_{model.activation}")
        self.dispatcher = make_dispatcher(model, elementwise, ep, blueprint.dispatcher)
        self.router = Router(model, tp)
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * inner))
        self.down = nn.Parameter(torch.empty(experts, inner, hidden))
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * inner)) if model.add_bias_linear else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden)) if model.add_bias_linear else None
        self.shardings = dict.fromkeys((name for name, _ in self.named_parameters(recurse=False)), Sharding("ep", 0))
        shared = model.moe_shared_expert_ffn_hidden_size
        self.shared = Mlp(model, shared, elementwise, tp) if shared else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routed]:
        """(batch, sequence, hidden) -> the same."""
        routing, shared = self.route(x)
        return self.mix(x, self.prepare(routing, shared))

    def route(self, x: torch.Tensor) -> tuple[Routing, torch.Tensor | None]:
        """The router, and the shared expert, which waits for no other: Megatron's scope moe_router."""
        x = x.view_as(
            x
        )  # its gradients are summed up here first: captured as one part they could not be in another order
        shared = None if self.shared is None else self.shared(x)
        return self.router(self.tp.own_tokens(x).flatten(0, 1)), shared

    def prepare(self, routing: Routing, shared: torch.Tensor | None) -> Prepared:
        """How rows will lie: Megatron's scope moe_preprocess."""
        return Prepared(routing, shared, self.dispatcher.prepare(routing))

    def mix(self, x: torch.Tensor, prepared: Prepared) -> tuple[torch.Tensor, Routed]:
        """Tokens to their experts and back."""
        own, routing = self.tp.own_tokens(x), prepared.routing
        own_mixed = self.dispatcher(own.flatten(0, 1), routing, prepared.layout, self._experts)
        mixed = self.tp.all_tokens(own_mixed.view_as(own))
        if prepared.shared is not None:
            mixed = mixed + prepared.shared
        return mixed, Routed(routing.loss, routing.choices)

    def _experts(self, rows: torch.Tensor, weights: torch.Tensor, layout: ExpertPermutation) -> torch.Tensor:
        """Each row through its expert, times its weight: (R, hidden) -> the same.

        The weight is applied within, where rows are narrower, and so the second bias is weighted by itself.
        """
        if self.gate_up_bias is None or self.down_bias is None:
            inner = self.activation(_product(rows, self.gate_up, layout), weights)
            return _product(inner, self.down, layout)
        member = _membership(layout, rows.dtype)
        gate_up = torch.addmm(_product(rows, self.gate_up, layout), member, self.gate_up_bias)
        if layout.holes and layout.capacity is None:
            # Rows behind the last expert's were never written: neither they nor their gradients may meet a bias.
            gate_up = gate_up.masked_fill(~member.any(1, keepdim=True), 0.0)
        inner = self.activation(gate_up, weights)
        weighted = (member * weights.unsqueeze(1)).to(rows.dtype)
        return torch.addmm(_product(inner, self.down, layout), weighted, self.down_bias)


def _membership(layout: ExpertPermutation, dtype: torch.dtype) -> torch.Tensor:
    """(R, experts): 1 where a row is an expert's. A product with it adds biases, and its gradient sums them up in a fixed
    order, which indexing by expert would not."""
    row = torch.arange(len(layout.tokens), device=layout.ends.device).unsqueeze(1)
    starts = torch.cat((layout.ends.new_zeros(1), layout.ends[:-1]))
    return ((row >= starts) & (row < layout.ends)).to(dtype)


def _product(rows: torch.Tensor, weight: torch.Tensor, layout: ExpertPermutation) -> torch.Tensor:
    if layout.capacity is None:
        return grouped_mm(rows, weight, layout.ends)
    return torch.bmm(rows.view(len(weight), layout.capacity, -1), weight).flatten(0, 1)
