"""Differentiable collectives. The backward pass of each is its transpose.

The host reads no tensor. All shapes follow from the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from launch.engines.torch_native.parallel.process_groups import Group

# PyTorch 2.13 renamed these functions and warns about the names of 2.11.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TensorOp = Callable[[torch.Tensor, Group], torch.Tensor]


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return ``x``, which is the same on every rank: (...) -> (...). Its gradient is the sum over ranks."""
    return _apply(x, group, _identity, _all_reduce)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over ranks: (...) -> (...). Every rank has the whole gradient of the sum."""
    return _apply(x, group, _all_reduce, _identity)


def all_gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Concatenate the ranks' ``x`` along ``dim``: n -> n * ranks. The gradient of a part is the sum of the ranks' gradients."""
    return _apply(x, group, partial(_all_gather, dim=dim), partial(_reduce_scatter, dim=dim))


def reduce_scatter(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Return this rank's part, along ``dim``, of the sum over ranks: n -> n / ranks."""
    return _apply(x, group, partial(_reduce_scatter, dim=dim), partial(_all_gather, dim=dim))


def scatter_to_group(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Return this rank's part of ``x`` along ``dim``: n -> n / ranks. Every rank has the whole ``x`` and its whole gradient."""
    return _apply(x, group, partial(_local_part, dim=dim), partial(_all_gather, dim=dim))


def gather_from_group(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Concatenate the ranks' ``x`` along ``dim``: n -> n * ranks. The transpose of :func:`scatter_to_group`."""
    return _apply(x, group, partial(_all_gather, dim=dim), partial(_local_part, dim=dim))


def all_to_all(x: torch.Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Exchange rows with every rank: (sum(sent), ...) -> (sum(received), ...). Rank 0 gets the first ``sent[0]`` rows."""
    exchange = partial(_all_to_all, sent=list(sent), received=list(received))
    return _apply(x, group, exchange, partial(_all_to_all, sent=list(received), received=list(sent)))


class _Collective(torch.autograd.Function):
    """Apply one operation to activations, and its transpose to gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, op: TensorOp, transpose: TensorOp) -> torch.Tensor:
        ctx.group, ctx.transpose = group, transpose
        return op(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.transpose(gradients[0], ctx.group), None, None, None


def _apply(x: torch.Tensor, group: Group, op: TensorOp, transpose: TensorOp) -> torch.Tensor:
    if group.size == 1:
        return x
    return cast(torch.Tensor, cast(Any, _Collective).apply(x, group, op, transpose))


def _identity(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.view_as(x)


def _all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.process_group)
    return total


def _local_part(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
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
