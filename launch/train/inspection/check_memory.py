"""The memory of a step check: that of an eager step, beside the graphs."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

COMPARISON_BYTES = 2**29
"""For the temporary tensors of a comparison."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def eager_step_bytes(device: torch.device) -> int:
    """Return what steps used at most, since the peaks were reset, beyond what is in use between them. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def missing_bytes(needed: int, device: torch.device) -> int:
    """Return how many of ``needed`` bytes are missing. Those that are there stay with PyTorch's allocator."""
    if device.type != "cuda":
        return 0
    try:
        torch.empty(needed + COMPARISON_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return max(needed + COMPARISON_BYTES - torch.cuda.mem_get_info(device)[0], 1)
    return 0


def requested_bytes(error: torch.OutOfMemoryError) -> int:
    """Return the size of the allocation that failed, at least 1."""
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)", str(error))
    return max(int(float(found[1]) * _UNITS[found[2]]), 1) if found else 1


def largest_on_ranks(value: float, device: torch.device) -> float:
    """Return the largest ``value`` of all ranks. A collective call."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
