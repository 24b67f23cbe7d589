"""One rank's events: phases with their memory, captures, proof, notes and exceptions. The one writer of its file."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from launch.common.atomic_files import JsonLines
from launch.common.redact import redact
from launch.contract.paths import AttemptPaths
from launch.contract.records.clocks import Clocks
from launch.contract.records.events import Phase
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.inspection import Inspection
from launch.contract.records.probe import Probe
from launch.train.telemetry import memory
from launch.train.telemetry.gpu_clocks import PhaseClocks


class Recorder:
    """Writes events/rank<r>.jsonl. Each event holds time (seconds since the epoch), kind, phase and step."""

    def __init__(self, attempt: AttemptPaths, rank: int, device: torch.device) -> None:
        self._lines = JsonLines(attempt.events(rank))
        self._device = device
        self._entered = time.monotonic()
        self._peaks_reset = True
        self._clocks: PhaseClocks | None = None
        self.phase: Phase = "init"
        self.step: int | None = None
        self._write("enter", pid=os.getpid())

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """End the phase at hand, with its memory and clocks, and begin ``phase``. Nothing happens where it is that one."""
        self.step = step
        if phase == self.phase:
            return
        self.leave()
        self.phase = phase
        self._write("enter")

    def leave(self) -> None:
        """The phase at hand has ended: write its memory, the clocks of its GPU and how long it took."""
        clocks = self._turn_clocks()
        self._write(
            "phase",
            memory=asdict(memory.sample(self._device)),
            clocks=clocks and asdict(clocks),
            seconds=time.monotonic() - self._entered,
        )
        if self._peaks_reset and not memory.reset_peaks(self._device):
            self._peaks_reset = False
            self.note("host memory peaks cannot be reset here: they are the process's, not a phase's")
        self._entered = time.monotonic()

    def _turn_clocks(self) -> Clocks | None:
        """Those of the phase that ends; None on a CPU, of the first phase, in which devices are found, and if not known."""
        if self._clocks is not None:
            return self._clocks.turn()
        if self._device.type == "cuda":
            self._clocks = PhaseClocks(self._device)
            if self._clocks.unknown:
                self.note(f"whether GPUs are throttled is not known: {self._clocks.unknown}")
        return None

    def choices(self, choices: Mapping[str, str]) -> None:
        """What the engine chose where the spec left it open."""
        self._write("choices", choices=dict(choices))

    def capture(self, stats: GraphStats) -> None:
        self._write("capture", graphs=asdict(stats))

    def proof(self, stats: GraphStats) -> None:
        self._write("proof", graphs=asdict(stats))

    def probe(self, probe: Probe) -> None:
        self._write("probe", probe=asdict(probe))

    def inspection(self, inspection: Inspection) -> None:
        self._write("inspection", inspection=asdict(inspection))

    def note(self, message: str) -> None:
        self._write("note", message=redact(message))

    def exception(self, error: BaseException) -> None:
        """Record ``error`` with the phase it came in; its trace holds no private path."""
        trace = "".join(traceback.format_exception(error))
        cause = broken_by(error)
        self._write("exception", type=type(cause).__name__, message=redact(str(cause)), traceback=redact(trace))

    def _write(self, kind: str, **content: Any) -> None:
        self._lines.write({"time": time.time(), "kind": kind, "phase": self.phase, "step": self.step, **content})


def broken_by(error: BaseException) -> BaseException:
    """``error``, or what it was raised over where it comes of ending a capture: torch.cuda.graph ends one that an
    exception leaves, and CUDA refuses that in its turn (901, or 904 of streams that were not joined yet)."""
    while error.__context__ is not None and _raised_in(error) == "capture_end":
        error = error.__context__
    return error


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].name if frames else ""
