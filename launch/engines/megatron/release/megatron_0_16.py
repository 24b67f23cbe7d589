"""The adapter of Megatron-Core 0.16.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.utils import get_batch_on_this_cp_rank

OptimizerCudaGraphWrapper: Any = None
"""0.16.1 has no graph of the optimizer, and a rule rejects it."""


def cut_for_context_parallelism(batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return this rank's part of each tensor: (microbatch size, sequence) -> (microbatch size, sequence / cp)."""
    cut: Mapping[str, torch.Tensor] = get_batch_on_this_cp_rank(batch)
    return cut


def has_captured(helper: TECudaGraphHelper) -> bool:
    """Return whether ``helper`` has captured; also true if no layer of this rank is in the scope."""
    return bool(helper.graphs_created())
