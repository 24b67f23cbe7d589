"""The memory of a step check: what an eager step takes in addition to the graphs, and copies on the host."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from launch.contract.records.step_check import COMPARISON_BYTES

_UNLIMITED = 2**62


def eager_step_bytes(device: torch.device, ranks: int) -> int:
    """Return the peak memory of steps since the peaks were reset, minus the memory in use between steps; 0 on a CPU.

    A pass that runs out of memory ends a run of several ranks. So theirs includes what the allocator lost between its blocks.
    """
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_reserved if ranks > 1 else torch.cuda.max_memory_allocated
    return peak(device) - torch.cuda.memory_allocated(device)


def missing_bytes(needed: int, device: torch.device) -> int:
    """Return how many of ``needed`` bytes are missing. If none are, PyTorch's allocator keeps the memory reserved."""
    if device.type != "cuda":
        return 0
    try:
        torch.empty(needed + COMPARISON_BYTES, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return max(needed + COMPARISON_BYTES - torch.cuda.mem_get_info(device)[0], 1)
    return 0


def pinned_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of pinned copies of ``tensors``. PyTorch rounds each up to a power of two."""
    return sum(1 << (tensor.nbytes - 1).bit_length() for tensor in tensors if tensor.nbytes)


def missing_host_bytes(needed: int, ranks: int) -> int:
    """Return how many bytes the host lacks for one rank, if each of its ``ranks`` takes ``needed`` bytes."""
    available = min(_free_memory(), *(_free_in_group(group) for group in _memory_groups()))
    return max(needed - available // ranks, 0)


def _free_memory() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 2**10


def _memory_groups() -> list[Path]:
    """Return the control groups (version 2) of this process, and those that contain them."""
    own = [
        line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")
    ]
    root = Path("/sys/fs/cgroup")
    return [root / place for path in own for place in (path.lstrip("/"), *map(str, Path(path.lstrip("/")).parents))]


def _free_in_group(group: Path) -> int:
    """Return the free bytes within the limit of ``group``, or a huge number without a limit. Cached files count as free."""
    limit, used, kinds = group / "memory.max", group / "memory.current", group / "memory.stat"
    if not limit.exists() or not limit.read_text().strip().isdigit():
        return _UNLIMITED
    files = dict(line.split() for line in kinds.read_text().splitlines())
    return int(limit.read_text()) - int(used.read_text()) + int(files["inactive_file"])


def largest_on_ranks(value: float, device: torch.device) -> float:
    """Return the largest ``value`` of all ranks. A collective call."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
