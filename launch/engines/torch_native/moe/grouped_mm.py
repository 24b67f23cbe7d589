"""One matrix product an expert over tokens sorted by expert, with no shape that depends on the routing.

In bfloat16 on CUDA it is PyTorch's own ``grouped_mm``, whose offsets stay on the device. That function takes no other
precision there without asking the host, and on a CPU neither float64 nor, once compiled, float32 (PyTorch 2.13); so a
custom operator stands in: a loop over experts that Dynamo does not look into. It reads the offsets, for which on a CPU
nothing waits; on CUDA the host does, and so such experts are not captured (docs/rules.md, capture.native_fp32_experts).
Inductor is told to leave them between its CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

UNSAFE = (torch.Tag.cudagraph_unsafe,)
"""A sequence: PyTorch takes a single tag from 2.13 on (torch/_library/custom_ops.py:622 of 2.11)."""


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` times their expert's matrix.

    Args:
        x: (rows, in), sorted by expert.
        weight: (experts, in, out).
        offsets: int32 of shape (experts,), where each expert's rows end; the last is ``rows``.

    Returns:
        (rows, out)
    """
    if x.device.type == "cuda" and x.dtype == torch.bfloat16:
        return nn.functional.grouped_mm(x, weight, offs=offsets)
    product: torch.Tensor = _rows(x, weight, offsets)
    return product


@torch.library.custom_op("launch::grouped_mm", mutates_args=(), tags=UNSAFE)
def _rows(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        torch.mm(x[start:end], weight[expert], out=out[start:end])
        start = end
    return out


@torch.library.custom_op("launch::grouped_mm_weight_gradient", mutates_args=(), tags=UNSAFE)
def _weight_gradient(x: torch.Tensor, gradient: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
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
