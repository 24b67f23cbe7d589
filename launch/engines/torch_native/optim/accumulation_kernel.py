"""Gradient accumulation as one Triton kernel, which reads and writes each tensor once. Import it only on a machine with CUDA.

Multiplications and additions are not fused, so the kernel equals PyTorch's operators in float32 bit for bit. The block size is
fixed, as that of AdamW's kernel is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from launch.engines.torch_native.optim.accumulation import BLOCK

WARPS = 8
"""Each thread adds four contiguous elements: 16 bytes in float32."""


def accumulate(
    into: torch.Tensor,
    held: torch.Tensor | None,
    held_scale: float,
    gradient: torch.Tensor,
    scale: float,
    adds: bool,
    squares: torch.Tensor | None,
) -> None:
    """Write the sum of ``held`` and ``gradient``, each times its scale, to ``into``, or add it. All are (elements,).

    Args:
        adds: add to ``into``; otherwise overwrite it.
        squares: float32 (blocks or more,), receives the sum of the squares of each block of ``BLOCK`` results.
    """
    count = len(into)
    _accumulate[triton.cdiv(count, BLOCK),](
        into, held, gradient, squares, held_scale, scale, count, adds, BLOCK, num_warps=WARPS, enable_fp_fusion=False
    )


@triton.jit(do_not_specialize_on_alignment=["squares_at"])
def _accumulate(
    into_at, held_at, gradient_at, squares_at, held_scale, scale, count, adds: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    place = number * block + tl.arange(0, block)
    inside = place < count
    value = tl.load(gradient_at + place, inside, other=0.0).to(tl.float32) * scale
    if held_at is not None:
        value += tl.load(held_at + place, inside, other=0.0).to(tl.float32) * held_scale
    if adds:
        value += tl.load(into_at + place, inside, other=0.0).to(tl.float32)
    stored = value.to(into_at.dtype.element_ty)
    tl.store(into_at + place, stored, inside)
    if squares_at is not None:
        value = stored.to(tl.float32)
        tl.store(squares_at + number, tl.sum(value * value))
