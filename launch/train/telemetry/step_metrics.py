"""Write steps to disk one step late, so that the host never waits for the step that it just enqueued."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from launch.common.atomic_files import JsonLines
from launch.contract.paths import AttemptPaths
from launch.contract.records.events import StepPhase
from launch.contract.records.step_metrics import StepMetrics


class StepTimer:
    """Time one step: by CUDA events on a GPU, by the wall clock on a CPU, where a step is done when its call returns."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        self._begun = self._ended = 0.0

    def begin(self) -> None:
        if self._events:
            self._events[0].record()
        self._begun = time.perf_counter()

    def end(self) -> None:
        if self._events:
            self._events[1].record()
        self._ended = time.perf_counter()

    def milliseconds(self) -> float:
        """Wait for the step to end and return its duration."""
        if self._events:
            self._events[1].synchronize()
            return float(self._events[0].elapsed_time(self._events[1]))
        return (self._ended - self._begun) * 1e3


@dataclass(frozen=True)
class PendingStep:
    """An enqueued step whose numbers may not be computed yet. ``loss`` and ``grad_norm`` are scalars."""

    step: int
    loss: torch.Tensor
    grad_norm: torch.Tensor
    timer: StepTimer
    tokens: int
    phase: StepPhase


class Metrics:
    """Read each step's numbers one step late. Rank 0 writes them.

    Every rank checks them, so all ranks end together.
    """

    def __init__(self, attempt: AttemptPaths, rank: int) -> None:
        self._lines = JsonLines(attempt.metrics) if rank == 0 else None
        self._pending: PendingStep | None = None

    def add(self, pending: PendingStep) -> None:
        """Take ``pending`` and write the step before it.

        Raises:
            NumericError: the previous step has a loss or gradient norm that is not finite. This step is on disk.
        """
        self.flush()
        self._pending = pending

    def flush(self) -> None:
        """Wait for the pending step and write it.

        Raises:
            NumericError: its loss or gradient norm is not finite.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        time_ms = pending.timer.milliseconds()
        metrics = StepMetrics(
            pending.step, float(pending.loss), float(pending.grad_norm), time_ms, pending.tokens, pending.phase
        )
        if self._lines:
            self._lines.write(metrics)
        metrics.check()
