"""Let Megatron-Core's own linear layers fuse weight gradients without a GPU, as Transformer Engine's do.

A product adds the gradient to the sum that Megatron-Core keeps, or overwrites the sum in the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


class FusedProduct(torch.autograd.Function):
    """Multiply (..., in) by a weight of (out, in). The weight's gradient goes to its ``main_grad``, and not to autograd."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, overwrites: bool) -> torch.Tensor:
        ctx.save_for_backward(given)
        ctx.weight, ctx.overwrites = weight, overwrites
        return given @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (given,), (gradient,) = ctx.saved_tensors, gradients
        sums = ctx.weight.main_grad
        (sums.copy_ if ctx.overwrites else sums.add_)(gradient.flatten(0, -2).t() @ given.flatten(0, -2))
        return gradient @ ctx.weight, None, None


def multiply(linear: Any, *, input: torch.Tensor, weight: torch.Tensor, bias: Any, **settings: Any) -> torch.Tensor:
    overwrites, linear.is_first_microbatch = getattr(linear, "is_first_microbatch", True), False
    product: torch.Tensor = FusedProduct.apply(input, weight, overwrites)
    return product if bias is None else product + bias


@contextmanager
def gradients_fused() -> Iterator[None]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    with (
        mock.patch.object(ColumnParallelLinear, "_forward_impl", multiply),
        mock.patch.object(RowParallelLinear, "_forward_impl", multiply),
    ):
        yield
