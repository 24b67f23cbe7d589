"""Write one rank's events: phases with memory and clocks, captures, proof, notes, exceptions."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from launch.common.atomic_files import JsonLines
from launch.common.redact import redact
from launch.contract.paths import AttemptPaths
from launch.contract.records.clocks import Clocks
from launch.contract.records.events import Phase
from launch.contract.records.identity import identity_of
from launch.contract.records.memory import Memory
from launch.engines.profile_ranges import RANGES
from launch.train.telemetry import memory
from launch.train.telemetry.gpu_clocks import PhaseClocks


class Recorder:
    """The only writer of events/rank<r>.jsonl. launch.contract.records.events describes the events."""

    def __init__(self, attempt: AttemptPaths, rank: int, device: torch.device) -> None:
        self._lines = JsonLines(attempt.events(rank))
        self.device = device
        self._entered = time.monotonic()
        self._peaks_reset = True
        self._earlier: list[Memory] = []
        """Samples of the current phase from before its peaks were reset."""
        self._clocks: PhaseClocks | None = None
        self.phase: Phase = "init"
        self.step: int | None = None
        self.write("enter", pid=os.getpid(), **identity_of(attempt))

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """End the current phase, record its memory and clocks, and begin ``phase``. Do nothing if it has already begun."""
        self.step = step
        if phase == self.phase:
            return
        self.leave()
        self.phase = phase
        self.write("enter")
        RANGES.enter_phase(phase)

    def leave(self) -> None:
        """End the current phase: write its memory, the clocks of its GPU and its duration.

        This takes time, which counts in the next phase, as it does in the first step of a user's program there.
        """
        now = time.monotonic()
        self.write(
            "phase",
            memory=memory.with_earlier_peaks(memory.sample(self.device), self._earlier),
            clocks=self._clocks_of_phase(),
            seconds=now - self._entered,
        )
        self._earlier.clear()
        self._reset_peaks()
        self._entered = now

    def _reset_peaks(self) -> None:
        if self._peaks_reset and not memory.reset_peaks(self.device):
            self._peaks_reset = False
            self.note("host memory peaks cannot be reset here, so they cover the process and not a phase")

    def _clocks_of_phase(self) -> Clocks | None:
        """Return the clocks of the phase that ends, or None on a CPU, for the first phase, or if unknown."""
        if self._clocks is not None:
            return self._clocks.end_phase()
        if self.device.type == "cuda":
            self._clocks = PhaseClocks(self.device)
            if self._clocks.unknown:
                self.note(f"GPU throttling is unknown: {self._clocks.unknown}")
        return None

    @contextmanager
    def excluding(self, *, seconds: bool = True) -> Iterator[None]:
        """Exclude the memory used inside the context from the phase's peaks, and with ``seconds`` its time from the phase's."""
        self._earlier.append(memory.sample(self.device))
        begun = time.monotonic()
        yield
        self._entered += (time.monotonic() - begun) * seconds
        self._reset_peaks()

    def note(self, message: str) -> None:
        self.write("note", message=redact(message))

    def exception(self, error: BaseException) -> None:
        """Record ``error`` with its phase. Private paths are removed from the traceback."""
        trace = "".join(traceback.format_exception(error))
        cause = broken_by(error)
        self.write("exception", type=type(cause).__name__, message=redact(str(cause)), traceback=redact(trace))

    def write(self, kind: str, **content: Any) -> None:
        """Write an event of ``kind``. Its content may include records (dataclasses)."""
        self._lines.write({"time": time.time(), "kind": kind, "phase": self.phase, "step": self.step, **content})


def broken_by(error: BaseException) -> BaseException:
    """Return ``error``, or its cause if the end of a capture raised it.

    If an exception leaves torch.cuda.graph, it ends the capture, and CUDA then raises another error (901, or 904 for streams
    that were not joined).
    """
    while error.__context__ is not None and _raised_in(error) == "capture_end":
        error = error.__context__
    return error


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].name if frames else ""
