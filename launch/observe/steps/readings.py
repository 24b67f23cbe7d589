"""Read times and numbers without making the host wait for a step that it just enqueued."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from launch.observe.steps.metric_log import Known, Later

Counts = tuple[int, int, int]
"""The numbers of captures, replays and compilations so far."""


@dataclass(frozen=True)
class Moment:
    """The end of a step, by the host's clock and on a GPU also by a CUDA event."""

    seconds: float
    event: torch.cuda.Event | None
    counts: Counts

    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())

    def milliseconds_since(self, before: Moment | None) -> float:
        """Return the time since ``before``, or 0 without one. On a GPU, wait for the events."""
        if before is None:
            return 0.0
        if self.event is None or before.event is None:
            return (self.seconds - before.seconds) * 1e3
        self.event.synchronize()
        return float(before.event.elapsed_time(self.event))


class Clock:
    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda

    def now(self, counts: Counts) -> Moment:
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Moment(time.perf_counter(), event, counts)


class _OnDevice:
    """A copy of a device's number on its way to the host."""

    def __init__(self, value: torch.Tensor) -> None:
        self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def ready(self) -> bool:
        return bool(self._event.query())

    def read(self) -> float:
        self._event.synchronize()
        return float(self._host)


def later(value: Any) -> Later:
    """Return a number of the program that can be read later. It is copied now, because a replay may overwrite its tensor.

    Raises:
        TypeError, ValueError: the value is neither a number nor a tensor of one element.
    """
    if not isinstance(value, torch.Tensor):
        return Known(float(value))
    one = value.detach()
    one = one.full_tensor() if hasattr(one, "full_tensor") else one
    return _OnDevice(one.reshape(())) if one.is_cuda else Known(float(one))
