"""Grouped GEMM: one matrix product per expert over tokens sorted by expert. Shapes do not depend on the routing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# A sequence, because PyTorch accepts a single tag only from 2.13 on (torch/_library/custom_ops.py:622 of 2.11).
UNSAFE = (torch.Tag.cudagraph_unsafe,)


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Multiply rows of ``x`` by the matrix of their expert: (rows, inputs) -> (rows, outputs).

    Args:
        x: (rows, inputs), sorted by expert.
        weight: (experts, inputs, outputs).
        offsets: int32 (experts,), the end of each expert's rows; the last is ``rows``.
    """
    # PyTorch's function keeps the offsets on the device only for bfloat16 on CUDA. In other precisions it reads them on the
    # host. On a CPU, PyTorch 2.13 rejects float64, and under torch.compile also float32.
    if x.device.type == "cuda" and x.dtype == torch.bfloat16:
        return nn.functional.grouped_mm(x, weight, offs=offsets)
    product: torch.Tensor = _rows(x, weight, offsets)
    return product


@torch.library.custom_op("launch::grouped_mm", mutates_args=(), tags=UNSAFE)
def _rows(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Compute :func:`grouped_mm` by a loop that Dynamo does not trace.

    On CUDA the host waits for the offsets. So such experts cannot be captured (docs/rules.md, capture.native_fp32_experts), and
    Inductor leaves them outside its CUDA graphs.
    """
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        torch.mm(x[start:end], weight[expert], out=out[start:end])
        start = end
    return out


@torch.library.custom_op("launch::grouped_mm_weight_gradient", mutates_args=(), tags=UNSAFE)
def _weight_gradient(x: torch.Tensor, gradient: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the weight: (rows, inputs), (rows, outputs) -> (experts, inputs, outputs)."""
    out = x.new_empty(offsets.numel(), x.shape[1], gradient.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        torch.mm(x[start:end].t(), gradient[start:end], out=out[expert])
        start = end
    return out


@_rows.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@_weight_gradient.register_fake
def _(x: torch.Tensor, gradient: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty(offsets.numel(), x.shape[1], gradient.shape[1])


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight, offsets = ctx.saved_tensors
    return _rows(gradient, weight.transpose(1, 2), offsets), _weight_gradient(x, gradient, offsets), None


_rows.register_autograd(_backward, setup_context=_save)
