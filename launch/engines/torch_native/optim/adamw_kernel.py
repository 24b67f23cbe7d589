"""AdamW as one Triton kernel, which reads and writes each tensor once. Import it only on a machine with CUDA.

Every operation rounds as PyTorch's operators do: multiplications and additions are not fused, divisions and roots are exact.
So the kernel equals ``adamw_in_operators`` bit for bit, except the payloads of NaN. Inductor would choose a block size by
timing, which probably changed bits and times between sweeps (docs/determinism.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from launch.contract.spec import Training

BLOCK = 1024
"""The number of elements that a program of the kernel updates."""
WARPS = 8
"""Each thread updates four contiguous elements: 16 bytes in float32. With more, values change threads before they are stored."""


class AdamWKernel:
    """Updates a slice: master weights, gradients, compute weights and moments, each (elements,), from five scalars."""

    def __init__(self, training: Training, decays: bool, lean: bool) -> None:
        """Compile at the first call.

        Args:
            training: the optimizer's settings.
            decays: the weights decay.
            lean: the masters are low halves, and the compute weights upper halves.
        """
        decay = training.weight_decay if decays else 0.0
        self._constants = training.adam_beta1, training.adam_beta2, training.adam_epsilon, decay, lean, BLOCK

    def __call__(
        self,
        weights: torch.Tensor,
        gradients: torch.Tensor,
        compute: torch.Tensor | None,
        mean: torch.Tensor,
        square: torch.Tensor,
        *scalars: torch.Tensor,
    ) -> None:
        count = len(weights)
        tensors = weights, gradients, compute, mean, square
        _update[triton.cdiv(count, BLOCK),](
            *tensors, *scalars, count, *self._constants, num_warps=WARPS, enable_fp_fusion=False
        )


@triton.jit
def _update(
    weight_at, gradient_at, compute_at, mean_at, square_at, scale_at, rate_at, correction1_at, correction2_at,
    held_at, count,
    beta1: tl.constexpr, beta2: tl.constexpr, epsilon: tl.constexpr, decay: tl.constexpr, lean: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * block + tl.arange(0, block)
    # A block that is held back reads and writes nothing.
    inside = (place < count) & (tl.load(held_at) == 0)
    rate = tl.load(rate_at)
    gradient = tl.load(gradient_at + place, inside).to(tl.float32) * tl.load(scale_at)
    mean = tl.load(mean_at + place, inside).to(tl.float32) * beta1 + gradient * (1 - beta1)
    square = tl.load(square_at + place, inside).to(tl.float32) * beta2 + gradient * gradient * (1 - beta2)
    root = tl.sqrt_rn(tl.div_rn(square, tl.load(correction2_at))) + epsilon
    change = tl.div_rn(tl.div_rn(mean, tl.load(correction1_at)), root)
    master = tl.load(weight_at + place, inside)
    if lean:
        upper = tl.load(compute_at + place, inside).to(tl.int16, bitcast=True).to(tl.int32)
        master = ((upper << 16) + master.to(tl.int32)).to(tl.float32, bitcast=True)
    master = master * (1 - rate * decay) - rate * change
    tl.store(mean_at + place, mean.to(mean_at.dtype.element_ty), inside)
    tl.store(square_at + place, square.to(square_at.dtype.element_ty), inside)
    if lean:
        # CUDA's NaN is 0x7fffffff, whose upper half would be rounded up to minus zero.
        bits = tl.where(master == master, master.to(tl.int32, bitcast=True), 0x7FC00000)
        low = bits.to(tl.int16)
        upper = ((bits - low.to(tl.int32)) >> 16).to(tl.int16)
        tl.store(weight_at + place, low, inside)
        tl.store(compute_at + place, upper.to(tl.bfloat16, bitcast=True), inside)
    else:
        tl.store(weight_at + place, master, inside)
        if compute_at is not None:
            tl.store(compute_at + place, master.to(compute_at.dtype.element_ty), inside)
