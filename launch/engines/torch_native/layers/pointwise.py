"""Operations between the matrix products of a decoder, as functions that can be compiled one by one.

Each compiles to one or two kernels (``training.compile: elementwise``). For bfloat16 inputs, sums and squares are in float32.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from launch.engines.torch_native.layers.rotary import Rotary

CLAMP = 7.0
QUICK_GELU = 1.702
"""Constants of GPT-OSS's activation: openai/gpt-oss, gpt_oss/torch/model.py, ``swiglu``."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm over the last dimension: (..., width), weight (width,) -> (..., width) (arXiv:1910.07467)."""
    return nn.functional.rms_norm(x, weight.shape, weight, epsilon)


def add_and_norm(
    x: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x + change`` and its RMSNorm, each (..., width) like ``x`` and ``change``."""
    x = x + change
    return x, rms_norm(x, weight, epsilon)


def norm_and_rotate(heads: torch.Tensor, weight: torch.Tensor | None, epsilon: float, rotary: Rotary) -> torch.Tensor:
    """Normalize each head if there is a weight, then rotate the channel pairs (i, i + kv_channels / 2). Keep the shape.

    Args:
        heads: (batch, sequence, heads, kv_channels).
        weight: (kv_channels,).
    """
    if weight is not None:
        heads = rms_norm(heads, weight, epsilon)
    cos, sin = rotary
    first, second = heads.chunk(2, dim=-1)
    # cos and sin in float32 promote each product to float32, so the result is rounded once.
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(heads.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """(..., 2 * width) -> (..., width). Shazeer, 2020, arXiv:2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def clamped_quick_gelu_glu(gate_up: torch.Tensor) -> torch.Tensor:
    """(..., 2 * width) -> (..., width): x * sigmoid(1.702 x) of the clamped gate, times the clamped up plus 1."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(QUICK_GELU * gate) * (up + 1)


class _TakeRows(torch.autograd.Function):
    """Take the rows that ``numbers``, (R,), name: (count, width) -> (R, width). A number of ``count`` takes any row.

    Its gradient is a product, which sums in a fixed order, unlike the gradient of indexing.
    """

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(numbers)
        ctx.count = len(table)
        return table[numbers.clamp(max=len(table) - 1)]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (numbers,) = ctx.saved_tensors
        members = numbers == torch.arange(ctx.count, device=numbers.device).unsqueeze(1)
        return members.to(gradients[0].dtype) @ gradients[0], None


def _add_biases(rows: torch.Tensor, biases: torch.Tensor | None, experts: torch.Tensor | None) -> torch.Tensor:
    """Add to each row, (R, width), the bias of its expert. Rows of no expert become zero, in the gradient too.

    Such rows are uninitialized. Neither they nor their gradients may reach a bias.

    Args:
        biases: (experts, width).
        experts: int32 (R,): the expert of each row, or the number of experts for no expert.
    """
    if biases is None or experts is None:
        return rows
    taken: torch.Tensor = cast(Any, _TakeRows).apply(biases, experts)
    return (rows + taken).masked_fill((experts == len(biases)).unsqueeze(1), 0.0)


def weighted_swiglu(
    gate_up: torch.Tensor,
    weight: torch.Tensor,
    biases: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return :func:`swiglu` with each row multiplied by its weight, shape (R,), after adding its expert's bias."""
    return (swiglu(_add_biases(gate_up, biases, experts)) * weight.unsqueeze(-1)).to(gate_up.dtype)


def weighted_clamped_quick_gelu_glu(
    gate_up: torch.Tensor,
    weight: torch.Tensor,
    biases: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return :func:`clamped_quick_gelu_glu` of rows, with biases and weights as in :func:`weighted_swiglu`."""
    biased = _add_biases(gate_up, biases, experts)
    return (clamped_quick_gelu_glu(biased) * weight.unsqueeze(-1)).to(gate_up.dtype)


def gather_sum(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Sum the rows that each group of indices names: (rows, width), (groups, size) -> (groups, width)."""
    total: torch.Tensor = rows[places.flatten()].unflatten(0, places.shape).sum(1)
    return total


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens in nats, shape (), in at least float32.

    Args:
        logits: (batch, sequence, vocab_size).
        targets: int64 (batch, sequence).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Elementwise:
    """The functions of this module, eager. An instance may contain compiled functions instead."""

    rms_norm = staticmethod(rms_norm)
    add_and_norm = staticmethod(add_and_norm)
    norm_and_rotate = staticmethod(norm_and_rotate)
    swiglu = staticmethod(swiglu)
    clamped_quick_gelu_glu = staticmethod(clamped_quick_gelu_glu)
    weighted_swiglu = staticmethod(weighted_swiglu)
    weighted_clamped_quick_gelu_glu = staticmethod(weighted_clamped_quick_gelu_glu)
    gather_sum = staticmethod(gather_sum)
    cross_entropy = staticmethod(cross_entropy)


ROW_FUNCTIONS = ("weighted_swiglu", "weighted_clamped_quick_gelu_glu", "gather_sum")
"""Functions whose number of rows differs between layers with the all-to-all dispatcher."""


def compiled() -> Elementwise:
    """Return an instance whose functions are compiled for static shapes. Row functions become dynamic if the row count changes.

    The first call of a function imports Inductor.
    """
    elementwise = Elementwise()
    for name, function in vars(Elementwise).items():
        if isinstance(function, staticmethod):
            dynamic = None if name in ROW_FUNCTIONS else False
            setattr(elementwise, name, torch.compile(function.__func__, fullgraph=True, dynamic=dynamic))
    return elementwise
