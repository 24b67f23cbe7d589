"""Collectives that autograd goes through, each with its transpose as its backward pass.

All shapes are known beforehand but those of :func:`exchange`, and none reads anything on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, cast

import torch
import torch.distributed as dist

from launch.engines.torch_native.mesh import Group

# PyTorch 2.13 renamed them, and warns of the names that 2.11 has.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``x``, which all ranks hold; its gradient is the sum of theirs."""
    return _apply(_Linear, x, group, _same, _sum)


def reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over all ranks, which all then hold; each has its whole gradient."""
    return _apply(_Linear, x, group, _sum, _same)


def gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The parts of all ranks in order along ``dim``. The gradient of a part is the sum of what all ranks have for it."""
    return _apply(_Along, x, group, dim, _all_gather, _reduce_scatter)


def reduce_scatter(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum over all ranks."""
    return _apply(_Along, x, group, dim, _reduce_scatter, _all_gather)


def split(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part along ``dim`` of ``x``, which all ranks hold, each with the whole gradient."""
    return _apply(_Along, x, group, dim, _part, _all_gather)


def join(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The parts of all ranks, which all then hold, each with the whole gradient: the transpose of :func:`split`."""
    return _apply(_Along, x, group, dim, _all_gather, _part)


def exchange(x: torch.Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Rows to every rank and from every rank: the first ``sent[0]`` rows go to rank 0, and so on."""
    return _apply(_Exchange, x, group, list(sent), list(received))


def _apply(function: type[torch.autograd.Function], x: torch.Tensor, group: Group, *arguments: object) -> torch.Tensor:
    if group.size == 1:
        return x
    return cast(torch.Tensor, cast(Any, function).apply(x, group, *arguments))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, there: Any, back: Any) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return cast(torch.Tensor, there(x, group))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
        return ctx.back(gradients[0], ctx.group), None, None, None


class _Along(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, there: Any, back: Any) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim, back
        return cast(torch.Tensor, there(x, group, dim))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
        return ctx.back(gradients[0], ctx.group, ctx.dim), None, None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _all_to_all(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Optional[torch.Tensor], ...]:
        return _all_to_all(gradients[0], ctx.group, ctx.received, ctx.sent), None, None, None


def _same(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.process_group)
    return total


def _part(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return x.chunk(group.size, dim)[group.rank].contiguous()


def _all_gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    parts = x.new_empty(group.size, *x.shape)
    all_gather_single(parts.view(-1), x.contiguous().view(-1), group=group.process_group)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    parts = torch.stack(x.chunk(group.size, dim))
    total = torch.empty_like(parts[0])
    reduce_scatter_single(total.view(-1), parts.view(-1), group=group.process_group)
    return total


def _all_to_all(x: torch.Tensor, group: Group, sent: list[int], received: list[int]) -> torch.Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group.process_group)
    return out
