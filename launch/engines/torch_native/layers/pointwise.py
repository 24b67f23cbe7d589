"""What a decoder computes between its matrix products, as plain functions, each of which may be compiled by itself.

Run one by one they read and write memory for every operation; compiled (``training.compile: elementwise``) each is one
or two kernels. Values of at least float32 are computed in their own precision, bfloat16 with intermediate results in
float32 where a sum or a square would suffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import nn

from launch.engines.torch_native.layers.rotary import Rotary

CLAMP = 7.0
QUICK_GELU = 1.702
"""Of GPT-OSS's activation: openai/gpt-oss, gpt_oss/torch/model.py, ``swiglu``."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Zhang and Sennrich, 2019, arXiv:1910.07467; over the last dimension."""
    return nn.functional.rms_norm(x, weight.shape, weight, epsilon)


def add_and_norm(
    x: torch.Tensor, change: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + change``, and the same normed."""
    x = x + change
    return x, rms_norm(x, weight, epsilon)


def norm_and_rotate(heads: torch.Tensor, weight: torch.Tensor | None, epsilon: float, rotary: Rotary) -> torch.Tensor:
    """Norm each head where there is a weight, then turn the pairs (i, i + kv_channels / 2).

    Args:
        heads: (batch, sequence, heads, kv_channels).
    """
    if weight is not None:
        heads = rms_norm(heads, weight, epsilon)
    cos, sin = rotary
    first, second = heads.chunk(2, dim=-1)
    # Sines of a higher precision promote each product; the result is rounded once.
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """(..., 2 * width) -> (..., width). Shazeer, 2020, arXiv:2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def clamped_quick_gelu_glu(gate_up: torch.Tensor) -> torch.Tensor:
    """(..., 2 * width) -> (..., width): x * sigmoid(1.702 x) of the clamped gate, times the clamped rest plus one."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * torch.sigmoid(QUICK_GELU * gate) * (up + 1)


def weighted_swiglu(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """:func:`swiglu`, each row times its weight of shape (...)."""
    return (swiglu(gate_up) * weight.unsqueeze(-1)).to(gate_up.dtype)


def weighted_clamped_quick_gelu_glu(gate_up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """:func:`clamped_quick_gelu_glu`, each row times its weight of shape (...)."""
    return (clamped_quick_gelu_glu(gate_up) * weight.unsqueeze(-1)).to(gate_up.dtype)


def gather_sum(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Of each group of ``places``, (groups, size), the sum of the rows named: (groups, width)."""
    total: torch.Tensor = rows[places.flatten()].unflatten(0, places.shape).sum(1)
    return total


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens, in nats; in at least float32.

    Args:
        logits: (batch, sequence, vocabulary).
        targets: int64 of shape (batch, sequence).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Elementwise:
    """The functions of this module, as they are or compiled."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = rms_norm
    add_and_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]] = (
        add_and_norm
    )
    norm_and_rotate: Callable[[torch.Tensor, torch.Tensor | None, float, Rotary], torch.Tensor] = norm_and_rotate
    swiglu: Callable[[torch.Tensor], torch.Tensor] = swiglu
    clamped_quick_gelu_glu: Callable[[torch.Tensor], torch.Tensor] = clamped_quick_gelu_glu
    weighted_swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = weighted_swiglu
    weighted_clamped_quick_gelu_glu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = (
        weighted_clamped_quick_gelu_glu
    )
    gather_sum: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = gather_sum
    cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy


OF_ROWS = ("weighted_swiglu", "weighted_clamped_quick_gelu_glu", "gather_sum")
"""Functions of rows, whose number differs from layer to layer where the all-to-all dispatcher brings them."""


def compiled() -> Elementwise:
    """Every function compiled for the shapes it meets; those of rows for any number of them once it has changed. Inductor
    is imported with the first call."""
    functions: dict[str, Any] = {
        field.name: torch.compile(
            cast(Any, field.default), fullgraph=True, dynamic=None if field.name in OF_ROWS else False
        )
        for field in fields(Elementwise)
    }
    return Elementwise(**functions)
