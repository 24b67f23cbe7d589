"""A mixture of experts: route, dispatch tokens to experts, grouped GEMMs, combine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.layers.mlp import Mlp
from launch.engines.torch_native.layers.recomputation import recompute_if
from launch.engines.torch_native.moe.permutation import ExpertPermutation
from launch.engines.torch_native.moe.router import Router, Routing
from launch.engines.torch_native.moe.token_dispatcher import Experts, make_dispatcher
from launch.engines.torch_native.parallel.sharding import Sharding
from launch.engines.torch_native.products.products import Products


class RoutingStats(NamedTuple):
    """The results of the routing that a step keeps."""

    loss: torch.Tensor
    """The router's auxiliary loss over this rank's tokens, shape (). Sum it over the tensor-parallel group."""
    tokens_per_expert: torch.Tensor
    """int64 (experts,): the number of this rank's tokens that chose each expert."""
    experts: torch.Tensor
    """int64 (T, topk): the experts of each of this rank's tokens. ``~expert`` stands for an expert that dropped the token."""


class Preprocessed(NamedTuple):
    """The results before any token moves: the routing, the shared expert's output and the permutation."""

    routing: Routing
    shared: torch.Tensor | None
    permutation: ExpertPermutation


class MixtureOfExperts(nn.Module):
    """Gated experts behind a top-k router, and a shared expert if the model has one.

    Without ``moe_expert_capacity_factor`` no token is dropped. Experts are sharded over ``ep``, never over the tensor-parallel
    group: each rank of that group routes a shard of the sequence.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        model, products, elementwise = context.model, context.products, context.elementwise
        tp, ep = context.tp, context.ep
        experts, hidden, inner = model.num_moe_experts // ep.size, model.hidden_size, model.moe_ffn_hidden_size
        self.tp = tp
        self.recomputed = context.training.recomputed
        self.activation = getattr(elementwise, f"weighted_{model.activation}")
        self.dispatcher = make_dispatcher(model, elementwise, ep, context.dispatcher)
        self.router = Router(model, tp)
        self.multiply_gate_up = products.of_experts(experts, hidden, 2 * inner)
        self.multiply_down = products.of_experts(experts, inner, hidden)
        self.gate_up = nn.Parameter(torch.empty(experts, *_shape(products, hidden, 2 * inner)))
        self.down = nn.Parameter(torch.empty(experts, *_shape(products, inner, hidden)))
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * inner)) if model.add_bias_linear else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden)) if model.add_bias_linear else None
        self.shardings = dict.fromkeys((name for name, _ in self.named_parameters(recurse=False)), Sharding("ep", 0))
        shared = model.moe_shared_expert_ffn_hidden_size
        self.shared = Mlp(context, shared) if shared else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, RoutingStats]:
        """(batch, sequence, hidden_size) -> the same."""
        routing, shared = self.route(x)
        return self.run_experts(x, self.preprocess(routing, shared))

    def route(self, x: torch.Tensor) -> tuple[Routing, torch.Tensor | None]:
        """Run the router and the shared expert on (batch, sequence, hidden_size): Megatron's scope moe_router."""
        # The view makes autograd first sum the gradients of router and shared expert. If both are captured as one part, their
        # gradients are summed in this order too. So eager and graphed runs are bitwise equal.
        x = x.view_as(x)
        shared = None if self.shared is None else recompute_if("shared_experts" in self.recomputed, self.shared)(x)
        return self.router(self.tp.scatter_tokens(x).flatten(0, 1)), shared

    def preprocess(self, routing: Routing, shared: torch.Tensor | None) -> Preprocessed:
        """Compute the permutation: Megatron's scope moe_preprocess.

        Args:
            shared: the shared expert's output, (batch, sequence, hidden_size).
        """
        return Preprocessed(routing, shared, self.dispatcher.preprocess(routing, self.router.repeated))

    def run_experts(self, x: torch.Tensor, prepared: Preprocessed) -> tuple[torch.Tensor, RoutingStats]:
        """Dispatch tokens (batch, sequence, hidden_size) to their experts, and combine the results in the same shape."""
        own, routing = self.tp.scatter_tokens(x), prepared.routing
        own_mixed = self.dispatcher(
            own.flatten(0, 1), routing, prepared.permutation, Experts(self._run, self.down_bias)
        )
        mixed = self.tp.gather_tokens(own_mixed.view_as(own))
        if prepared.shared is not None:
            mixed = mixed + prepared.shared
        choices = self.dispatcher.choices(routing, prepared.permutation)
        return mixed, RoutingStats(routing.loss, routing.tokens_per_expert, choices)

    def _run(self, rows: torch.Tensor, weights: torch.Tensor, permutation: ExpertPermutation) -> torch.Tensor:
        """Run each row through its expert and multiply it by its weight: (R, hidden_size), (R,) -> (R, hidden_size).

        The weight is applied between the two products, where rows are narrower. The second bias is left to the dispatcher,
        which has fewer tokens than rows.
        """
        biases = () if self.gate_up_bias is None else (self.gate_up_bias, permutation.experts())

        def run(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            active = self.activation(gate_up, weights, *biases)
            return self.multiply_down(active, self.down, permutation.ends, permutation.capacity)

        gate_up = self.multiply_gate_up(rows, self.gate_up, permutation.ends, permutation.capacity)
        return recompute_if("moe_act" in self.recomputed, run)(gate_up, weights)


def _shape(products: Products, inputs: int, outputs: int) -> tuple[int, int]:
    """Return the shape of an expert's matrix."""
    return (outputs, inputs) if products.outputs_first else (inputs, outputs)
