"""The lean AdamW as one Triton kernel, which reads and writes each tensor once. Import it only on a machine with CUDA.

Every operation rounds as PyTorch's operators do: multiplications and additions are not fused, divisions and roots are exact.
So the kernel equals ``lean_adamw`` bit for bit, except the payloads of NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from launch.contract.spec import Training

BLOCK = 1024
"""The number of elements that a program of the kernel updates."""


class LeanKernel:
    """Updates a slice: low halves of masters, gradients, weights and moments, each (elements,), from four scalars."""

    def __init__(self, training: Training, decays: bool) -> None:
        decay = training.weight_decay if decays else 0.0
        self._constants = training.adam_beta1, training.adam_beta2, training.adam_epsilon, decay

    def __call__(
        self,
        low: torch.Tensor,
        gradients: torch.Tensor,
        weights: torch.Tensor,
        mean: torch.Tensor,
        square: torch.Tensor,
        *scalars: torch.Tensor,
    ) -> None:
        count = len(low)
        tensors = low, gradients, weights.view(torch.int16), mean, square
        _update[triton.cdiv(count, BLOCK),](*tensors, *scalars, count, *self._constants, BLOCK, enable_fp_fusion=False)


@triton.jit
def _update(
    low_at, gradient_at, weight_at, mean_at, square_at, scale_at, rate_at, correction1_at, correction2_at, count,
    beta1: tl.constexpr, beta2: tl.constexpr, epsilon: tl.constexpr, decay: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < count
    rate = tl.load(rate_at)
    gradient = tl.load(gradient_at + place, inside).to(tl.float32) * tl.load(scale_at)
    mean = tl.load(mean_at + place, inside).to(tl.float32) * beta1 + gradient * (1 - beta1)
    square = tl.load(square_at + place, inside).to(tl.float32) * beta2 + gradient * gradient * (1 - beta2)
    root = tl.sqrt_rn(tl.div_rn(square, tl.load(correction2_at))) + epsilon
    change = tl.div_rn(tl.div_rn(mean, tl.load(correction1_at)), root)
    joined = (tl.load(weight_at + place, inside).to(tl.int32) << 16) + tl.load(low_at + place, inside).to(tl.int32)
    master = joined.to(tl.float32, bitcast=True) * (1 - rate * decay) - rate * change
    # CUDA's NaN is 0x7fffffff, whose upper half would be rounded up to minus zero.
    bits = tl.where(master == master, master.to(tl.int32, bitcast=True), 0x7FC00000)
    low = bits.to(tl.int16)
    tl.store(low_at + place, low, inside)
    tl.store(weight_at + place, ((bits - low.to(tl.int32)) >> 16).to(tl.int16), inside)
    tl.store(mean_at + place, mean.to(tl.bfloat16), inside)
    tl.store(square_at + place, square.to(tl.bfloat16), inside)
