"""A mixture of experts without dropping: route, sort tokens by expert, multiply in groups, put back.

Every shape follows from the configuration alone and nothing is read by the host, so that the layer can be captured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from launch.engines.torch_native.grouped_mm import grouped_mm
from launch.spec import Model


class Routing(NamedTuple):
    """Where each of T tokens goes."""

    weights: torch.Tensor
    """(T, topk): what each chosen expert's output counts for; at least float32."""
    experts: torch.Tensor
    """int64 of shape (T, topk)."""
    logits: torch.Tensor
    """(T, experts)"""


class Router(nn.Module):
    """A linear gate, in at least float32: rounding logits to bfloat16 changes which experts are chosen."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.topk = model.moe_router_topk
        self.order = model.moe_router_order
        self.normalize = model.moe_router_normalize_topk
        self.weight = nn.Parameter(torch.empty(model.num_moe_experts, model.hidden_size))

    def forward(self, x: torch.Tensor) -> Routing:
        """(T, hidden) -> Routing"""
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = nn.functional.linear(x.to(dtype), self.weight.to(dtype))
        if self.order == "topk_then_softmax":
            chosen, experts = logits.topk(self.topk, dim=-1)
            return Routing(chosen.softmax(-1), experts, logits)
        weights, experts = logits.softmax(-1).topk(self.topk, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(weights, experts, logits)


def permute(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` in another order. ``inverse`` undoes ``order``."""
    permuted: torch.Tensor = _Permute.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


class _Permute(torch.autograd.Function):
    """Indexing's own gradient adds rows up, slowly and in no fixed order; a permutation's gradient is its inverse."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse], None, None


class MixtureOfExperts(nn.Module):
    """SwiGLU experts behind a top-k router."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        experts, hidden, inner = model.num_moe_experts, model.hidden_size, model.moe_ffn_hidden_size
        self.aux_loss_coeff = model.moe_aux_loss_coeff
        self.z_loss_coeff = model.moe_z_loss_coeff
        self.router = Router(model)
        self.gate_up = nn.Parameter(torch.empty(experts, hidden, 2 * inner))
        self.down = nn.Parameter(torch.empty(experts, inner, hidden))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, sequence, hidden) -> the same, and the router's losses as a scalar."""
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        topk = routing.experts.shape[1]
        sorted_experts, order = routing.experts.flatten().sort(stable=True)
        inverse = order.argsort()
        offsets = _ends(sorted_experts, len(self.gate_up))
        rows = permute(tokens.repeat_interleave(topk, dim=0), order, inverse)
        outputs = permute(self._experts(rows, offsets), inverse, order).view(-1, topk, x.shape[-1])
        mixed = (outputs * routing.weights.unsqueeze(-1)).sum(1).to(x.dtype)
        return mixed.view_as(x), self._router_loss(routing, offsets)

    def _experts(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        gate, up = grouped_mm(rows, self.gate_up, offsets).chunk(2, dim=-1)
        return grouped_mm(nn.functional.silu(gate) * up, self.down, offsets)

    def _router_loss(self, routing: Routing, offsets: torch.Tensor) -> torch.Tensor:
        loss = routing.logits.new_zeros(())
        if self.aux_loss_coeff:
            loss = loss + self.aux_loss_coeff * load_balancing_loss(routing.logits, offsets)
        if self.z_loss_coeff:
            loss = loss + self.z_loss_coeff * routing.logits.logsumexp(-1).square().mean()
        return loss


def load_balancing_loss(logits: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """experts * sum over experts of (share of choices) * (mean probability); 1 where both are even.

    Fedus et al., Switch Transformers (arXiv:2101.03961), equation 4, over the choices of one micro-batch as in
    Megatron-Core's ``switch_load_balancing_loss_func``.
    """
    experts = logits.shape[1]
    chosen = torch.diff(offsets, prepend=offsets.new_zeros(1)).to(logits.dtype)
    return experts * torch.dot(chosen / chosen.sum(), logits.softmax(-1).mean(0))


def _ends(sorted_experts: torch.Tensor, experts: int) -> torch.Tensor:
    """Where each expert's rows end, int32 of shape (experts,)."""
    numbers = torch.arange(experts, device=sorted_experts.device)
    return torch.searchsorted(sorted_experts, numbers, right=True, out_int32=True)
