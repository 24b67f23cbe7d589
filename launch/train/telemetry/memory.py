"""Measure the memory of this process and of its device."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from launch.contract.records.memory import Memory

# proc(5), /proc/PID/clear_refs: reset the peak resident set size.
_CLEAR_PEAK = "5"


def sample(device: torch.device) -> Memory:
    """Return the memory now and its peaks since :func:`reset_peaks`, in bytes."""
    status = _status()
    host_rss, host_peak = status["VmRSS"], status["VmHWM"]
    if device.type != "cuda":
        return Memory(host_rss, host_peak)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return Memory(
        host_rss,
        host_peak,
        allocated=torch.cuda.memory_allocated(device),
        peak_allocated=torch.cuda.max_memory_allocated(device),
        reserved=reserved,
        peak_reserved=torch.cuda.max_memory_reserved(device),
        graph_pool=_graph_pool_bytes(),
        device_outside=total - free - reserved,
    )


def with_earlier_peaks(last: Memory, earlier: Sequence[Memory]) -> Memory:
    """Return ``last`` with the largest peaks of ``last`` and ``earlier``."""

    def largest(peaks: Iterable[int | None]) -> int | None:
        return max((peak for peak in peaks if peak is not None), default=None)

    samples = (last, *earlier)
    return replace(
        last,
        host_peak_rss=max(one.host_peak_rss for one in samples),
        peak_allocated=largest(one.peak_allocated for one in samples),
        peak_reserved=largest(one.peak_reserved for one in samples),
    )


def reset_peaks(device: torch.device) -> bool:
    """Reset the peaks. Return False if the system does not allow it. The host's peak then covers the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
    except OSError:
        return False
    return True


def _graph_pool_bytes() -> int:
    """Return the bytes of segments in private pools (segment_pool_id other than (0, 0)), as cudagraph trees count them."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))


def _status() -> dict[str, int]:
    """Return the kB fields of /proc/self/status in bytes."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def host_total() -> int:
    """Return this host's memory in bytes."""
    if not sys.platform.startswith("linux"):
        raise OSError(f"platform {sys.platform}: jobs run on Linux only")
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
