"""Read times and numbers without making the host wait for a step that it just enqueued."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from launch.observe.steps.metric_log import Known, Later

_handle_of: Callable[[int], int | None] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: None)
"""Return the handle of a device's current stream, or None if this PyTorch does not tell it."""
Counts = tuple[int, int, int]
"""The numbers of captures, replays and compilations so far."""
MOST_BEGUN = 32
"""The number of copies that wait for a mark. A program may accumulate gradients for long, or never end a step."""
PINNED = 512
"""The numbers in one piece of pinned memory, because to pin memory takes time. It serves some hundred steps that wait."""


class Mark:
    """A place in a stream. It remembers that the GPU has passed it, since each question to CUDA costs time."""

    def __init__(
        self, event: torch.cuda.Event, free: list[torch.cuda.Event], stream: torch.cuda.Stream, begun: Sequence[Copy]
    ) -> None:
        """Take ``event``, recorded in ``stream``, for the end of the copies ``begun`` before. It returns to ``free``."""
        self._event = event
        self._free = free
        self._passed = False
        for copy in begun:
            copy.end_before(self, stream)

    def ready(self) -> bool:
        self._passed = self._passed or bool(self._event.query())
        return self._passed

    def wait(self) -> None:
        if not self._passed:
            self._event.synchronize()
            self._passed = True

    def milliseconds_to(self, later: Mark) -> float:
        """Return the time between two marks that the GPU has passed, once. From then on, the event may serve another mark."""
        milliseconds = float(self._event.elapsed_time(later._event))
        self._free.append(self._event)
        return milliseconds


class Moment:
    """The end of a step, by ``seconds`` of the host's clock and on a GPU also by a mark in the current stream.

    ``own_seconds`` is the observer's own time so far.
    """

    def __init__(self, counts: Counts, own_seconds: float, seconds: float, mark: Recorded | None = None) -> None:
        self.counts = counts
        self.own_seconds = own_seconds
        self._seconds = seconds
        self._mark = None if mark is None else Mark(*mark)

    def ready(self) -> bool:
        return self._mark is None or self._mark.ready()

    def milliseconds_since(self, before: Moment | None) -> float:
        """Return the time since ``before``, or 0 without one. On a GPU, wait for the marks. Ask once for each step, in order."""
        if self._mark is not None:
            self._mark.wait()
        if before is None:
            return 0.0
        if self._mark is None or before._mark is None:
            return (self._seconds - before._seconds) * 1e3
        return before._mark.milliseconds_to(self._mark)


class Copy:
    """A device's number on its way to ``host``, pinned memory that serves the next number once this one is read."""

    def __init__(self, free: list[Copy], host: torch.Tensor) -> None:
        self._free = free
        self._host = host
        self._after: Mark | None = None

    def begin(self, value: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Copy ``value`` on ``stream``, its device's current one, where the program has enqueued it."""
        self._stream = stream
        self._host.copy_(value, non_blocking=True)
        self._after = None

    def end_before(self, mark: Mark, stream: torch.cuda.Stream) -> None:
        """Take ``mark``, a later one in ``stream``, for the end of the copy. If the copy is in another stream, set a mark
        there."""
        if self._stream != stream:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            mark = Mark(event, [], self._stream, ())
        self._after = mark

    def ready(self) -> bool:
        return bool(self._after.ready() if self._after else self._stream.query())

    def read(self) -> float:
        """Wait for the number and return it, once. From then on, another one may take its place, unless a mark after this
        one still comes."""
        (self._after.wait if self._after else self._stream.synchronize)()
        number = float(self._host.item())
        if self._after:
            self._free.append(self)
        return number


Recorded = tuple[torch.cuda.Event, list[torch.cuda.Event], torch.cuda.Stream, Sequence[Copy]]
"""What a :class:`Mark` is made of. A hook only records the event."""
Ended = tuple[Counts, float, float, Recorded | None]
"""What a :class:`Moment` is made of."""


class Readings:
    """Takes times and numbers. Steady steps pin no memory and make no event, and one event serves all copies of a step."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._begun: list[Copy] = []
        """The copies since the last mark."""
        self._copies: dict[tuple[torch.device, torch.dtype], list[Copy]] = defaultdict(list)
        """The copies that may begin."""
        self._free: list[torch.cuda.Event] = []
        """The events that may serve again."""
        self._device: int | None = None
        """The device of marks: the current one at the first of them."""
        self._handle: int | None = None
        self._stream: torch.cuda.Stream
        """The stream with this handle."""

    def record(self) -> Recorded | None:
        """Record an event in the current stream of a GPU. Return it as :class:`Mark` takes it."""
        if not self._cuda:
            return None
        # Take the copies first: another thread may begin one after the mark.
        begun, self._begun = self._begun, []
        stream, free = self._current_stream(), self._free
        try:
            event = free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event, free, stream, begun

    def _current_stream(self) -> torch.cuda.Stream:
        """Return the current stream of the device of marks. PyTorch makes another object of it at each question, so ask only if
        its handle has changed."""
        if self._device is None:
            self._device = torch.cuda.current_device()
        handle = _handle_of(self._device)
        if handle is None or handle != self._handle:
            self._handle, self._stream = handle, torch.cuda.current_stream(self._device)
        return self._stream

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
        free = self._copies[one.device, one.dtype]
        try:
            copy = free.pop()
        except IndexError:
            copy, *more = _pin(free, one.dtype)
            free.extend(more)
        stream = self._current_stream()
        if one.device != stream.device:
            stream = torch.cuda.current_stream(one.device)
        copy.begin(one.reshape(()) if one.dim() else one, stream)
        self._begun.append(copy)
        if len(self._begun) == MOST_BEGUN and (mark := self.record()):
            Mark(*mark)
        return copy


def _pin(free: list[Copy], dtype: torch.dtype) -> list[Copy]:
    """Return copies in new pinned memory, each of which returns to ``free`` when it is read."""
    # The program may have another default device, and may report its first number in inference mode.
    with torch.inference_mode(False):
        return [Copy(free, one) for one in torch.empty((PINNED,), dtype=dtype, device="cpu", pin_memory=True).unbind()]
