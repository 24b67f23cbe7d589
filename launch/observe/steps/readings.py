"""Read times and numbers without making the host wait for a step that it just enqueued."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch

from launch.observe.steps.metric_log import Known, Later

Counts = tuple[int, int, int]
"""The numbers of captures, replays and compilations so far."""
MOST_BEGUN = 32
"""The number of copies that wait for a mark. A program may accumulate gradients for long, or never end a step."""


class Mark:
    """A place in a stream. It remembers that the GPU has passed it, since each question to CUDA costs time."""

    def __init__(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        self.event = event
        self._passed = False
        event.record(stream)

    def ready(self) -> bool:
        self._passed = self._passed or bool(self.event.query())
        return self._passed

    def wait(self) -> None:
        if not self._passed:
            self.event.synchronize()


class Moment:
    """The end of a step, by the host's clock and on a GPU also by a mark in the current stream."""

    def __init__(self, counts: Counts, mark: Mark | None = None) -> None:
        self.counts = counts
        self._mark = mark
        self._seconds = time.perf_counter()

    def ready(self) -> bool:
        return self._mark is None or self._mark.ready()

    def milliseconds_since(self, before: Moment | None) -> float:
        """Return the time since ``before``, or 0 without one. On a GPU, wait for the marks."""
        if before is None:
            return 0.0
        if self._mark is None or before._mark is None:
            return (self._seconds - before._seconds) * 1e3
        self._mark.wait()
        return float(before._mark.event.elapsed_time(self._mark.event))


class Copy:
    """A device's number on its way to the host, in pinned memory that serves the next number once this one is read."""

    def __init__(self, free: list[Copy], dtype: torch.dtype) -> None:
        self._free = free
        # The program may have another default device, and may report its first number in inference mode.
        with torch.inference_mode(False):
            self._host = torch.empty((), dtype=dtype, device="cpu", pin_memory=True)
        self._after: Mark | None = None

    def begin(self, value: torch.Tensor) -> None:
        """Copy ``value`` on its device's current stream, where the program has enqueued it."""
        self._stream = torch.cuda.current_stream(value.device)
        self._host.copy_(value, non_blocking=True)
        self._after = None

    def end_before(self, mark: Mark, stream: torch.cuda.Stream) -> None:
        """Take ``mark``, a later one in ``stream``, for the end of the copy. If the copy is in another stream, set a mark
        there."""
        self._after = mark if self._stream == stream else Mark(torch.cuda.Event(), self._stream)

    def ready(self) -> bool:
        return bool(self._after.ready() if self._after else self._stream.query())

    def read(self) -> float:
        """Wait for the number and return it, once. From then on, another one may take its place."""
        (self._after.wait if self._after else self._stream.synchronize)()
        number = float(self._host.item())
        self._free.append(self)
        return number


class Readings:
    """Takes times and numbers. Steady steps allocate no pinned memory, and one event serves all copies of a step."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._begun: list[Copy] = []
        """The copies since the last mark."""
        self._free: dict[tuple[torch.device, torch.dtype], list[Copy]] = defaultdict(list)

    def now(self, counts: Counts) -> Moment:
        return Moment(counts, self._set_mark() if self._cuda else None)

    def _set_mark(self) -> Mark:
        # Take the copies first: another thread may begin one after the mark.
        begun, self._begun = self._begun, []
        stream = torch.cuda.current_stream()
        mark = Mark(torch.cuda.Event(enable_timing=True), stream)
        for copy in begun:
            copy.end_before(mark, stream)
        return mark

    def later(self, value: Any) -> Later:
        """Return a number of the program that can be read later. It is copied now, because a replay may overwrite its tensor.

        Raises:
            TypeError, ValueError, RuntimeError: the value is neither a number nor a tensor of one element.
        """
        if not isinstance(value, torch.Tensor):
            return Known(float(value))
        if not value.is_cuda:
            return Known(float(value.item()))
        one = value.detach() if value.requires_grad else value
        free = self._free[one.device, one.dtype]
        try:
            copy = free.pop()
        except IndexError:
            copy = Copy(free, one.dtype)
        copy.begin(one.reshape(()) if one.dim() else one)
        self._begun.append(copy)
        if len(self._begun) == MOST_BEGUN:
            self._set_mark()
        return copy
