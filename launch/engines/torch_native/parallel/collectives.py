"""Collectives that autograd goes through, each with its transpose as its backward pass.

All shapes are known beforehand but those of :func:`all_to_all`, and none reads anything on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from launch.engines.torch_native.parallel.process_groups import Group

# PyTorch 2.13 renamed them, and warns of the names that 2.11 has.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Way = Callable[[torch.Tensor, Group], torch.Tensor]


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """``x``, which all ranks hold; its gradient is the sum of theirs."""
    return _apply(x, group, _same, _sum)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over all ranks, which all then hold; each has its whole gradient."""
    return _apply(x, group, _sum, _same)


def gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The parts of all ranks in order along ``dim``. The gradient of a part is the sum of what all ranks have for it."""
    return _apply(x, group, partial(_all_gather, dim=dim), partial(_reduce_scatter, dim=dim))


def reduce_scatter(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum over all ranks."""
    return _apply(x, group, partial(_reduce_scatter, dim=dim), partial(_all_gather, dim=dim))


def scatter_to_group(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part along ``dim`` of ``x``, which all ranks hold, each with the whole gradient."""
    return _apply(x, group, partial(_part, dim=dim), partial(_all_gather, dim=dim))


def gather_from_group(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """The parts of all ranks, which all then hold, each with the whole gradient: the transpose of :func:`scatter_to_group`."""
    return _apply(x, group, partial(_all_gather, dim=dim), partial(_part, dim=dim))


def all_to_all(x: torch.Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Rows to every rank and from every rank: the first ``sent[0]`` rows go to rank 0, and so on."""
    there = partial(_all_to_all, sent=list(sent), received=list(received))
    return _apply(x, group, there, partial(_all_to_all, sent=list(received), received=list(sent)))


class _Collective(torch.autograd.Function):
    """One way for activations, and its transpose for gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, there: Way, back: Way) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.group), None, None, None


def _apply(x: torch.Tensor, group: Group, there: Way, back: Way) -> torch.Tensor:
    if group.size == 1:
        return x
    return cast(torch.Tensor, cast(Any, _Collective).apply(x, group, there, back))


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
