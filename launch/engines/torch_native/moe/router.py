"""The router of a mixture of experts: which experts each token is sent to, and what their outputs count for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from launch.contract.spec import Model
from launch.engines.torch_native.parallel import collectives
from launch.engines.torch_native.parallel.process_groups import Group
from launch.engines.torch_native.parallel.tensor_parallel import TensorParallel

TINY = 1e-20
"""Keeps sums of scores that have all underflowed from dividing by nothing, as in Megatron-Core."""


class Routing(NamedTuple):
    """Where each of T tokens goes."""

    weights: torch.Tensor
    """(T, topk): what each chosen expert's output counts for; at least float32."""
    experts: torch.Tensor
    """int64 of shape (T, topk)."""
    loss: torch.Tensor
    """The router's own losses over these tokens, a scalar; the sum over a tensor-parallel group is the loss."""
    choices: torch.Tensor
    """How many of these tokens chose each expert: int64 of shape (experts,)."""


class Router(nn.Module):
    """A linear gate, in at least float32: rounding logits to bfloat16 changes which experts are chosen.

    ``expert_bias`` is no parameter: it steers the choice, not the weights, and moves against each expert's load after
    every step (Wang et al., 2024, arXiv:2408.15664; Megatron-Core's ``moe_router_enable_expert_bias``).
    """

    expert_bias: torch.Tensor | None

    def __init__(self, model: Model, tp: TensorParallel) -> None:
        super().__init__()
        self.model = model
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(model.num_moe_experts, model.hidden_size))
        self.bias = nn.Parameter(torch.empty(model.num_moe_experts)) if model.add_bias_linear else None
        self.register_buffer("expert_bias", None)
        self.shardings = {name: tp.within for name, _ in self.named_parameters()}

    def reset_expert_bias(self) -> None:
        """In float32 whatever the weights are in: an update is smaller than what bfloat16 resolves."""
        if self.model.moe_router_enable_expert_bias:
            self.expert_bias = torch.zeros(len(self.weight), dtype=torch.float32, device=self.weight.device)

    def forward(self, x: torch.Tensor) -> Routing:
        """(T, hidden) -> Routing"""
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = nn.functional.linear(x.to(dtype), self.weight.to(dtype), bias)
        weights, experts = choose(logits, self.model, self.expert_bias)
        choices = count_choices(experts, logits)
        unsteered = choices
        if self.expert_bias is not None and self.model.moe_aux_loss_coeff:
            unsteered = count_choices(choose(logits, self.model, None)[1], logits)
        return Routing(weights, experts, router_loss(logits, unsteered, self.model, self.tp.group), choices)

    @torch.no_grad()
    def update_expert_bias(self, choices: torch.Tensor) -> None:
        """Move each expert's bias by ``moe_router_bias_update_rate``, up where it was chosen less than the mean.

        Args:
            choices: float32 of shape (experts,), summed over the step's tokens.
        """
        if self.expert_bias is not None:
            rate = self.model.moe_router_bias_update_rate
            self.expert_bias.add_(torch.sign(choices.mean() - choices), alpha=rate)


def choose(logits: torch.Tensor, model: Model, expert_bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, experts) -> weights and numbers of the chosen experts, each of shape (T, topk)."""
    topk = model.moe_router_topk
    if model.moe_router_order == "topk_then_softmax":
        chosen, experts = logits.topk(topk, dim=-1)
        return chosen.softmax(-1), experts
    scores = logits.softmax(-1) if model.moe_router_score_function == "softmax" else logits.sigmoid()
    if expert_bias is None:
        weights, experts = scores.topk(topk, dim=-1)
    else:
        experts = (scores + expert_bias).topk(topk, dim=-1).indices
        weights = scores.gather(-1, experts)
    if model.moe_router_normalize_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights, experts


def count_choices(experts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """How many tokens chose each expert: int64 of shape (experts,)."""
    return torch.zeros_like(logits, dtype=torch.int64).scatter(1, experts, 1).sum(0)


def router_loss(logits: torch.Tensor, choices: torch.Tensor, model: Model, group: Group) -> torch.Tensor:
    """The load-balancing loss and the z-loss (Zoph et al., ST-MoE, arXiv:2202.08906, equation 5), each times its
    coefficient: this rank's share of those over all tokens of the group.

    ``choices`` are those without an expert bias, as in Megatron-Core's ``compute_routing_scores_for_aux_loss``.
    """
    loss = logits.new_zeros(())
    if model.moe_aux_loss_coeff:
        if model.moe_router_score_function == "softmax":
            probabilities = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            probabilities = scores / (scores.sum(-1, keepdim=True) + TINY)
        everybodys = collectives.reduce_from_group(choices, group)
        loss = loss + model.moe_aux_loss_coeff * load_balancing_loss(probabilities, everybodys) / group.size
    if model.moe_z_loss_coeff:
        loss = loss + model.moe_z_loss_coeff * logits.logsumexp(-1).square().mean() / group.size
    return loss


def load_balancing_loss(probabilities: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """experts * sum over experts of (share of choices) * (mean probability); 1 where both are even.

    Fedus et al., Switch Transformers (arXiv:2101.03961), equation 4, over the choices of one micro-batch as in
    Megatron-Core's ``switch_load_balancing_loss_func``.
    """
    chosen = choices.to(probabilities.dtype)
    return probabilities.shape[1] * torch.dot(chosen / chosen.sum(), probabilities.mean(0))
