"""Gradient accumulation in as few passes over memory as possible, with ``training.compile``.

On CUDA, a bfloat16 gradient whose main gradient is float32 moves 4 bytes per parameter for the first of several microbatches, 8
for the second and 10 for each other one. Separate operators move 4 bytes to clear gradients and 10 for each microbatch. On one
rank the last microbatch also sums the squares for the norm, which would take another 4 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 1024
"""The number of elements that a program of the kernel adds."""
LEAST_FUSED_ELEMENTS = 2**18
"""For smaller tensors a kernel of our own does not pay off: it takes tens of microseconds of host time."""
REST_ELEMENTS = 2**16
"""The most elements of a gradient that are copied because their place is needed."""


class FusedAccumulation:
    """Adds ``scale`` times a gradient to its main gradient. The step's first overwrites it, so no clearing is needed.

    The first of several gradients is only copied into its float32 place, in bfloat16 and unscaled. The second is added to it
    before both are written. The numbers are those of two additions.

    Args:
        sums_squares: keep the squares of the last gradients' sums, for :meth:`squared_norm`.
    """

    def __init__(self, sums_squares: bool = False) -> None:
        self._sums_squares = sums_squares
        self._held: dict[int, float] = {}
        """By address of a main gradient that holds the step's first gradient: its scale."""
        self._block_sums: dict[int, torch.Tensor] = {}
        """By address of the main gradient: the sums of its squares, float32 (blocks,). A graph of the step writes them too."""
        self._small: dict[int, torch.Tensor] = {}
        """By address: the main gradients that no kernel of our own adds to."""

    def __call__(self, into: torch.Tensor, gradient: torch.Tensor, scale: float, first: bool, last: bool) -> None:
        """Accumulate. ``into`` and ``gradient`` have one shape. ``first`` and ``last`` are those of the step."""
        if into.is_cuda and into.dtype != torch.float64 and into.numel() >= LEAST_FUSED_ELEMENTS:
            self._in_one_pass(into.view(-1), gradient.contiguous().view(-1), scale, first, last)
            return
        self._small[into.data_ptr()] = into
        if first:
            into.copy_(gradient).mul_(scale)
        else:
            into.add_(gradient, alpha=scale)

    def squared_norm(self) -> torch.Tensor | None:
        """Return the sum of the squares of all main gradients after a step's last ones, shape (); None if it is not kept."""
        if not self._block_sums:
            return None
        small = torch._foreach_norm(list(self._small.values()), 2, dtype=torch.float32) if self._small else []
        return torch.cat([*self._block_sums.values(), *(one.square().view(1) for one in small)]).sum()

    def _in_one_pass(self, into: torch.Tensor, gradient: torch.Tensor, scale: float, first: bool, last: bool) -> None:
        from launch.engines.torch_native.optim.accumulation_kernel import accumulate  # Triton is only where CUDA is

        address, count = into.data_ptr(), len(into)
        if first and not last and into.itemsize == 2 * gradient.itemsize:
            self._held[address] = scale
            _upper_half(into, gradient.dtype).copy_(gradient)
            return
        sums = self._sums_of(into) if last and self._sums_squares else None
        held_scale = self._held.pop(address, None)
        if first or held_scale is None:
            accumulate(into, None, 0.0, gradient, scale, not first, sums)
            return
        held = _upper_half(into, gradient.dtype)
        for part in writable_parts(count):
            # The last part would overwrite what it reads.
            own = held[part].clone() if part.stop == count else held[part]
            own_sums = None if sums is None else sums[part.start // BLOCK :]
            accumulate(into[part], own, held_scale, gradient[part], scale, False, own_sums)

    def _sums_of(self, into: torch.Tensor) -> torch.Tensor:
        address = into.data_ptr()
        if address not in self._block_sums:
            self._block_sums[address] = into.new_zeros(-(-len(into) // BLOCK), dtype=torch.float32)
        return self._block_sums[address]


def _upper_half(into: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the second half of the memory of ``into``, (elements,), as (elements,) of ``dtype``, which is half as wide."""
    return into.view(dtype)[len(into) :]


def writable_parts(count: int) -> Iterator[slice]:
    """Divide ``count`` elements so that no part, in writing order, covers what a later part reads from the upper half."""
    start = 0
    while count - start > REST_ELEMENTS:
        stop = (count + start) // 2 // BLOCK * BLOCK
        yield slice(start, stop)
        start = stop
    yield slice(start, count)
