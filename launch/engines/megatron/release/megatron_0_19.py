"""The adapter of Megatron-Core 0.19.2."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.utils import get_batch_on_this_cp_rank

__all__ = ["OptimizerCudaGraphWrapper", "cut_for_context_parallelism", "has_captured"]


def cut_for_context_parallelism(batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return this rank's part of each tensor: (microbatch size, sequence) -> (microbatch size, sequence / cp)."""
    # Without a group, Megatron-Core silently cuts by the rank in the whole world.
    group = parallel_state.get_context_parallel_group()
    cut: Mapping[str, torch.Tensor] = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    return cut


def has_captured(helper: TECudaGraphHelper) -> bool:
    """Return whether ``helper`` has captured; also true if no layer of this rank is in the scope."""
    return bool(helper.capture_finished())
