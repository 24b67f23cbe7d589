"""A copy of everything that computing a step changes, to compute the step again from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from launch.engines.random_states import random_states_kept

PART_ELEMENTS = 2**26
"""The number of elements of the state that are copied at once, a power of two."""


class Snapshot:
    """A copy of everything that computing a step changes: ``state``, and the states of ``generators``."""

    def __init__(self, state: Sequence[torch.Tensor], generators: Sequence[torch.Generator], on_host: bool) -> None:
        self._state, self._generators = state, generators
        self._values = [_to_host(tensor) if on_host else tensor.clone() for tensor in state]

    @contextmanager
    def restored(self) -> Iterator[None]:
        try:
            with random_states_kept(self._generators):
                yield
        finally:
            if self._values:
                torch._foreach_copy_(list(self._state), self._values)


def parts_of(state: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``state`` in parts, because PyTorch may round the pinned copy of a large tensor up to twice its size."""
    tensors = [tensor.detach() for tensor in state]
    return [
        part
        for tensor in tensors
        for part in (tensor.view(-1).split(PART_ELEMENTS) if tensor.is_contiguous() else [tensor])
    ]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)
