"""The states of the generators that a step draws random numbers from.

Passes that are not steps, such as those of a warm-up within a capture, must not advance them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators of the CPU and of ``device``."""
    if device.type == "cpu":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


@contextmanager
def random_states_kept(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Give ``generators`` their present states again at the end of the context."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
