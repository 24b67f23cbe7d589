"""The protocol of graph implementations, and what all of them demand of their inputs."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from launch.contract.errors import ReplayError
from launch.contract.records.graph_stats import GraphStats
from launch.engines.protocol import StepKind


class Ran(NamedTuple):
    """What a step left: scalars of shape (), the caller's own and never graph memory, and what kind of step it was."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    kind: StepKind


class Graphs(Protocol):
    @property
    def capture_step(self) -> int | None: ...

    def run(self, step: int, batch: torch.Tensor) -> Ran:
        """Step number ``step``. The capture step captures first, of which nothing is executed, and runs from it then.

        Raises:
            ReplayError: ``batch`` is not what was captured.
            CaptureError: what was to be captured could not be.
        """

    def stats(self) -> GraphStats: ...

    def close(self) -> None:
        """Release graphs, and with them the communicators that they hold."""


def check_input(name: str, captured: torch.Tensor, given: torch.Tensor) -> None:
    """Raises ReplayError where ``given`` is not of the shape, dtype and device that was captured."""
    for what in ("shape", "dtype", "device"):
        before, now = getattr(captured, what), getattr(given, what)
        if before != now:
            before, now = (tuple(before), tuple(now)) if what == "shape" else (before, now)
            raise ReplayError(f"{name} has {what} {now}, and was captured with {before}: a replay repeats the capture")
