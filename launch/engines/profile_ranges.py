"""Name a rank's phases, steps, micro-batches and layers for Nsight Systems, with NVTX ranges. Without it, name nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

Run = Callable[[int, int, torch.Tensor | None], torch.Tensor | None]


class ProfileRanges:
    """NVTX ranges of this process. Each is nested in the one that is open."""

    def __init__(self) -> None:
        self.are_named = False
        """Whether a profile is recorded. A rank sets it before it builds its engine."""
        self._in_phase = False

    def named(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a range. Compiled code has no range, since a range would break its graph."""
        if not self.are_named or torch.compiler.is_compiling():
            return nullcontext()
        return torch.cuda.nvtx.range(name)

    def of_microbatch(self, direction: str, run: Run) -> Run:
        """Return ``run`` (chunk, micro-batch, tensor) with each call in its own range."""

        def named(chunk: int, number: int, given: torch.Tensor | None) -> torch.Tensor | None:
            with self.named(f"micro-batch {number} {direction}"):
                return run(chunk, number, given)

        return named

    def enter_phase(self, name: str) -> None:
        """Begin the range of a phase, and end the range of the phase before."""
        if not self.are_named:
            return
        if self._in_phase:
            torch.cuda.nvtx.range_pop()
        torch.cuda.nvtx.range_push(name)
        self._in_phase = True


RANGES = ProfileRanges()
