"""The router of a mixture of experts: it chooses the experts of each token and their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from launch.contract.spec import Model
from launch.engines.protocol import Ranked
from launch.engines.torch_native.parallel import collectives
from launch.engines.torch_native.parallel.process_groups import Group
from launch.engines.torch_native.parallel.tensor_parallel import TensorParallel

TINY = 1e-20
"""Avoids a division by zero if all scores of a token underflow, as in Megatron-Core."""


class Routing(NamedTuple):
    """The experts of each of T tokens, with weights and losses."""

    weights: torch.Tensor
    """(T, topk), at least float32: the factor on each chosen expert's output."""
    experts: torch.Tensor
    """int64 (T, topk)."""
    loss: torch.Tensor
    """Shape (): the auxiliary losses of these tokens. Their sum over the tensor-parallel group is the loss."""
    tokens_per_expert: torch.Tensor
    """int64 (experts,): the number of these tokens that chose each expert."""


@dataclass(eq=False)
class RepeatedChoice:
    """Experts that another computation chose for T tokens, and how they rank in the router that repeats this choice.

    If experts have a capacity, the choice includes which of them dropped the token.
    """

    experts: torch.Tensor
    """int64 (T, topk)."""
    dropped: torch.Tensor
    """bool (T, topk)."""
    of_experts: Ranked = field(init=False)
    """The scores of these experts. The gap is summed over a token's experts."""
    of_tokens: Ranked | None = field(init=False, default=None)
    """The weights of these tokens, by which experts with a capacity keep them; None without a capacity."""

    @classmethod
    def of(cls, routing: torch.Tensor) -> RepeatedChoice:
        """Return the choice ``routing``, int64 (T, topk), where ``~expert`` stands for an expert that dropped the token."""
        dropped = routing < 0
        return cls(torch.where(dropped, ~routing, routing), dropped)

    @property
    def ranked(self) -> tuple[Ranked, ...]:
        return (self.of_experts,) if self.of_tokens is None else (self.of_experts, self.of_tokens)

    def kept(self, weights: torch.Tensor) -> torch.Tensor:
        """Return which experts keep which tokens, bool in the shape of ``weights``, (T, experts)."""
        return torch.zeros_like(weights, dtype=torch.bool).scatter(1, self.experts, ~self.dropped)

    @torch.no_grad()
    def score(self, ranked: torch.Tensor) -> None:
        """Set ``of_experts`` from the values by which the router ranks experts, (T, experts)."""
        scores = ranked.gather(-1, self.experts)
        best = ranked.topk(self.experts.shape[-1], dim=-1).values
        self.of_experts = Ranked(scores, (best.sum(-1) - scores.sum(-1)).max())

    @torch.no_grad()
    def score_dropping(self, weights: torch.Tensor, capacity: int) -> None:
        """Set ``of_tokens``. Its gap is infinite if an expert keeps too many or too few tokens, which rounding does not change.

        A token whose weight underflows may be dropped although places are free, because it changes nothing.

        Args:
            weights: (T, experts), by which each expert keeps at most ``capacity`` tokens. 0 if a token did not choose it.
        """
        kept = self.kept(weights)
        dropped = torch.zeros_like(kept).scatter(1, self.experts, self.dropped)
        heaviest = weights.where(dropped, -math.inf).amax(0)
        lead = heaviest - weights.where(kept, math.inf).amin(0)
        count = kept.sum(0)
        misplaced = (count > capacity) | ((count < capacity) & (heaviest > TINY))
        self.of_tokens = Ranked(
            weights.gather(1, self.experts), lead.masked_fill(misplaced, math.inf).max().clamp(min=0)
        )

    def rank_kept_first(self, weights: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
        """Return values, (T, topk), by which each expert keeps the repeated tokens, and compare them with its own choice.

        Args:
            weights: (T, topk), by which each of ``experts`` keeps at most ``capacity`` tokens.
        """
        self.score_dropping(weights.new_zeros(len(weights), experts).scatter(1, self.experts, weights), capacity)
        return weights.masked_fill(self.dropped, -1)


class Router(nn.Module):
    """A linear gate in at least float32, because rounding router logits to bfloat16 changes which experts are chosen.

    ``expert_bias`` is not a parameter. It affects the choice but not the weights. After every step it moves against each
    expert's load (Wang et al., 2024, arXiv:2408.15664; Megatron-Core's ``moe_router_enable_expert_bias``).
    """

    expert_bias: torch.Tensor | None

    def __init__(self, model: Model, tp: TensorParallel) -> None:
        super().__init__()
        self.model = model
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(model.num_moe_experts, model.hidden_size))
        self.bias = nn.Parameter(torch.empty(model.num_moe_experts)) if model.add_bias_linear else None
        self.register_buffer("expert_bias", None)
        self.repeated: RepeatedChoice | None = None
        """The choice for the next forward pass; None lets the router choose."""
        self.shardings = {name: tp.inside_sharding for name, _ in self.named_parameters()}

    def reset_expert_bias(self) -> None:
        """Set the expert bias to zero. It is always float32, because updates are below the resolution of bfloat16."""
        if self.model.moe_router_enable_expert_bias:
            self.expert_bias = torch.zeros(len(self.weight), dtype=torch.float32, device=self.weight.device)

    def forward(self, x: torch.Tensor) -> Routing:
        """(T, hidden_size) -> Routing."""
        logits = self._logits(x)
        weights, experts = choose_experts(logits, self.model, self.expert_bias, self.repeated)
        tokens_per_expert = count_tokens_per_expert(experts, logits)
        unbiased = tokens_per_expert
        if self.expert_bias is not None and self.model.moe_aux_loss_coeff:
            unbiased = count_tokens_per_expert(choose_experts(logits, self.model, None)[1], logits)
        return Routing(weights, experts, router_loss(logits, unbiased, self.model, self.tp.group), tokens_per_expert)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden_size) -> (T, experts), in at least float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        if x.dtype != torch.bfloat16 or torch.compiler.is_compiling():
            return nn.functional.linear(x.to(dtype), self.weight.to(dtype), bias)
        logits: torch.Tensor = cast(Any, _Gate).apply(x, self.weight)
        return logits if bias is None else logits + bias

    @torch.no_grad()
    def update_expert_bias(self, tokens_per_expert: torch.Tensor) -> None:
        """Raise each expert's bias by ``moe_router_bias_update_rate`` if it was chosen less than the mean, else lower it.

        Args:
            tokens_per_expert: float32 (experts,), summed over all tokens of the step.
        """
        if self.expert_bias is not None:
            rate = self.model.moe_router_bias_update_rate
            self.expert_bias.add_(torch.sign(tokens_per_expert.mean() - tokens_per_expert), alpha=rate)


class _Gate(torch.autograd.Function):
    """Multiply bfloat16 tokens by bfloat16 weights, in float32 without copies: (T, hidden), (experts, hidden) -> (T, experts).

    Products of bfloat16 numbers are exact in float32. Backward, the float32 gradient enters as a sum of two bfloat16 numbers,
    which keeps 16 of its 24 bits.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _exact_product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        high = gradients[0].to(x.dtype)
        both = torch.cat((high, (gradients[0] - high).to(x.dtype)), dim=1)
        of_high, of_low = _exact_product(both.t(), x).chunk(2)
        return both @ torch.cat((weight, weight)), (of_high + of_low).to(weight.dtype)


def _exact_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Multiply bfloat16 matrices, (n, k) and (k, m). Return float32 (n, m)."""
    return torch.mm(x, y, out_dtype=torch.float32) if x.is_cuda else x.float() @ y.float()


def choose_experts(
    logits: torch.Tensor, model: Model, expert_bias: torch.Tensor | None, repeated: RepeatedChoice | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: router logits (T, experts) -> weights and int64 indices of the chosen experts, each (T, topk).

    With ``repeated``, the indices are those of its experts.
    """
    if model.moe_router_order == "topk_then_softmax":
        chosen, experts = _choose(logits, model.moe_router_topk, repeated)
        return chosen.softmax(-1), experts
    scores = logits.softmax(-1) if model.moe_router_score_function == "softmax" else logits.sigmoid()
    if expert_bias is None:
        weights, experts = _choose(scores, model.moe_router_topk, repeated)
    else:
        experts = _choose(scores + expert_bias, model.moe_router_topk, repeated)[1]
        weights = scores.gather(-1, experts)
    if model.moe_router_normalize_topk:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights, experts


def _choose(ranked: torch.Tensor, topk: int, repeated: RepeatedChoice | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``topk`` largest values of (T, experts), or those of ``repeated``, and their indices, each (T, topk)."""
    if repeated is None:
        chosen, experts = ranked.topk(topk, dim=-1)
        return chosen, experts
    repeated.score(ranked)
    return ranked.gather(-1, repeated.experts), repeated.experts


def count_tokens_per_expert(experts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Count the tokens of each expert: int64 (T, topk), router logits (T, experts) -> int64 (experts,)."""
    return torch.zeros_like(logits, dtype=torch.int64).scatter(1, experts, 1).sum(0)


def router_loss(logits: torch.Tensor, tokens_per_expert: torch.Tensor, model: Model, group: Group) -> torch.Tensor:
    """Return this rank's share of the load-balancing loss and the z-loss, each times its coefficient, shape ().

    The z-loss is equation 5 of Zoph et al., ST-MoE, arXiv:2202.08906.

    Args:
        logits: router logits, (T, experts).
        tokens_per_expert: int64 (experts,), without an expert bias, as in Megatron-Core's
            ``compute_routing_scores_for_aux_loss``.
        group: the ranks whose tokens share the losses.
    """
    loss = logits.new_zeros(())
    if model.moe_aux_loss_coeff:
        if model.moe_router_score_function == "softmax":
            probabilities = logits.softmax(-1)
        else:
            scores = logits.sigmoid()
            probabilities = scores / (scores.sum(-1, keepdim=True) + TINY)
        all_tokens_per_expert = collectives.reduce_from_group(tokens_per_expert, group)
        loss = loss + model.moe_aux_loss_coeff * load_balancing_loss(probabilities, all_tokens_per_expert) / group.size
    if model.moe_z_loss_coeff:
        loss = loss + model.moe_z_loss_coeff * logits.logsumexp(-1).square().mean() / group.size
    return loss


def load_balancing_loss(probabilities: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """Return E * sum over E experts of (share of choices) * (mean probability), shape (). It is 1 if both are uniform.

    Equation 4 of Fedus et al., Switch Transformers (arXiv:2101.03961), over one microbatch as in Megatron-Core's
    ``switch_load_balancing_loss_func``.

    Args:
        probabilities: (T, experts).
        tokens_per_expert: int64 (experts,).
    """
    chosen = tokens_per_expert.to(probabilities.dtype)
    return probabilities.shape[1] * torch.dot(chosen / chosen.sum(), probabilities.mean(0))
