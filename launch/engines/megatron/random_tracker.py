"""The generators of Megatron-Core's tracker of random states."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.random import get_all_rng_states

from launch.engines.random_states import default_generators


def generators_of_steps(device: torch.device) -> list[torch.Generator]:
    """Return the default generators, and those of Transformer Engine's tracker (attention, and sharded sequences)."""
    tracked = [state for state in get_all_rng_states().values() if isinstance(state, torch.Generator)]
    return [*default_generators(device), *tracked]
