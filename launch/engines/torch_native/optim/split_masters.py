"""float32 master weights stored as two halves: the bfloat16 weights that the model computes with, and the low 16 bits as int16.

The weight is the master rounded to nearest, and ties away from zero. The bits of a master are 65,536 times those of its weight
plus its low half as a signed number, so both halves together are exact. Transformer Engine's FusedAdam with
``store_param_remainders`` stores masters in the same way, except NaN.
"""

from __future__ import annotations

import torch


def join(weights: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the masters, float32 in the shape of ``weights`` (bfloat16) and ``low`` (int16)."""
    return ((weights.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights (bfloat16) and low halves (int16) of float32 ``masters``, in their shape. NaN loses its payload."""
    # CUDA's NaN is 0x7fffffff, whose upper half would be rounded up to minus zero.
    bits = torch.where(masters.isnan(), torch.nan, masters).view(torch.int32)
    low = bits.to(torch.int16)
    return ((bits - low.int()) >> 16).to(torch.int16).view(torch.bfloat16), low
