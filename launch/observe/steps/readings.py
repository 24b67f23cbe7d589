"""Read times and numbers without making the host wait for a step that it just enqueued."""

from __future__ import annotations

import time
from collections import defaultdict
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


class Copy:
    """A device's number on its way to the host, in pinned memory that serves the next number once this one is read."""

    def __init__(self, free: list[Copy], dtype: torch.dtype) -> None:
        self._free = free
        self._host = torch.empty((), dtype=dtype, pin_memory=True)
        self._event = torch.cuda.Event()
        self._ready = False

    def begin(self, value: torch.Tensor) -> Copy:
        """Copy ``value`` on its device's current stream, where the program has enqueued it."""
        self._host.copy_(value, non_blocking=True)
        self._event.record(torch.cuda.current_stream(value.device))
        self._ready = False
        return self

    def ready(self) -> bool:
        self._ready = self._ready or bool(self._event.query())
        return self._ready

    def read(self) -> float:
        """Wait for the number and return it, once. From then on, another one may take its place."""
        if not self._ready:
            self._event.synchronize()
        number = float(self._host.item())
        self._free.append(self)
        return number


class Readings:
    """Takes times and numbers. A steady program makes it allocate nothing, since memory and events serve again."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._events: list[torch.cuda.Event] = []
        self._copies: dict[tuple[torch.device, torch.dtype], list[Copy]] = defaultdict(list)
        """Those that nobody uses. An event belongs to its device."""

    def now(self, counts: Counts) -> Moment:
        event = None
        if self._cuda:
            event = self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)
            event.record()
        return Moment(time.perf_counter(), event, counts)

    def later(self, value: Any) -> Later:
        """Return a number of the program that can be read later. It is copied now, because a replay may overwrite its tensor.

        Raises:
            TypeError, ValueError, RuntimeError: the value is neither a number nor a tensor of one element.
        """
        if not isinstance(value, torch.Tensor):
            return Known(float(value))
        one = value.full_tensor() if hasattr(value, "full_tensor") else value
        if not one.is_cuda:
            return Known(float(one.item()))
        free = self._copies[one.device, one.dtype]
        try:
            copy = free.pop()
        except IndexError:
            copy = Copy(free, one.dtype)
        one = one.detach() if one.requires_grad else one
        return copy.begin(one.reshape(()) if one.dim() else one)
