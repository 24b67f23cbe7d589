"""Compute the gradient norm and clip on the device, so that a graph can contain both.

Megatron-Core 0.19.2 takes the kernels for this from Transformer Engine (optimizer/clip_grads.py:11), which has all of them from
2.14 on. With an older release it reads the norm on the host, or without Apex even that of each gradient. Here PyTorch's kernels
replace the missing ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.optimizer import clip_grads

from launch.engines.graph_protocol import replaced


@contextmanager
def norm_on_device() -> Iterator[str]:
    """Compute both on the device inside the context. Yield the library whose kernels do so."""
    if clip_grads.multi_tensor_scale_tensor_impl is not None:
        yield "Transformer Engine"
        return
    with replaced(clip_grads, "l2_norm_impl", _norm), replaced(clip_grads, "multi_tensor_scale_tensor_impl", _scale):
        yield "PyTorch"


def _norm(
    chunk_size: int, overflow: torch.Tensor, lists: Sequence[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the 2-norm of all tensors of the first list, shape (1,), as Transformer Engine's ``multi_tensor_l2norm`` does."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).reshape(1), None


def _scale(chunk_size: int, overflow: torch.Tensor, lists: Sequence[list[torch.Tensor]], factor: torch.Tensor) -> None:
    """Multiply the tensors of the first list in place by ``factor``, shape (1,). The second list has the same tensors."""
    torch._foreach_mul_(lists[0], factor.reshape(()))
