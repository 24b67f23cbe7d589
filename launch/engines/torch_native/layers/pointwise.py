"""Operations between the matrix products of a decoder, as functions that can be compiled one by one.

Each compiles to one or two kernels (``training.compile: elementwise``). For bfloat16 inputs, sums and squares are in float32.
"""

from __future__ import annotations

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


def weighted_swiglu(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return :func:`swiglu` with each row multiplied by its weight, shape (...)."""
    return (swiglu(gate_up) * weight.unsqueeze(-1)).to(gate_up.dtype)


def weighted_clamped_quick_gelu_glu(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return :func:`clamped_quick_gelu_glu` with each row multiplied by its weight, shape (...)."""
    return (clamped_quick_gelu_glu(gate_up) * weight.unsqueeze(-1)).to(gate_up.dtype)


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
