"""A step's passes, eager or graphed, and what kind of step each was."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from launch.contract.errors import CaptureError
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import CudaGraph
from launch.engines.megatron.graphs.replay_counter import ReplayCounter
from launch.engines.megatron.schedule import Schedule
from launch.engines.protocol import StepKind
from launch.engines.torch_native.graphs.protocol import check_input


class Ran(NamedTuple):
    """A step's loss, of shape () and the caller's own, and what kind of step it was. Its gradients are final."""

    loss: torch.Tensor
    kind: StepKind


class Steps(Protocol):
    @property
    def capture_step(self) -> int | None: ...

    def run(self, step: int, batch: torch.Tensor) -> Ran:
        """Step number ``step``, whose gradient buffers are zero, but for the optimizer.

        Raises:
            ReplayError: ``batch`` is not what was captured.
            CaptureError: Megatron-Core refused to capture, or captured nothing.
        """

    def stats(self) -> GraphStats: ...

    def close(self) -> None:
        """Release graphs, and with them the communicators that they hold."""


class Eager:
    capture_step = None

    def __init__(self, schedule: Schedule, warmup_steps: int) -> None:
        self._schedule = schedule
        self._warmup_steps = warmup_steps

    def run(self, step: int, batch: torch.Tensor) -> Ran:
        return Ran(self._schedule.run(batch), "warmup" if step < self._warmup_steps else "steady")

    def stats(self) -> GraphStats:
        return GraphStats(impl="none", mechanism="eager")

    def close(self) -> None:
        pass


class Capture(Protocol):
    """One of Megatron-Core's ways to capture.

    Attributes:
        mechanism: in words, for the record.
        scope: what it captures of a step, as GraphStats names it.
        tally: of replays behind the capture's step. A layer's forward graph counts, which its backward graph follows.
        capture_seconds: what the capture took.
    """

    mechanism: str
    scope: tuple[str, ...]
    tally: ReplayCounter
    capture_seconds: float

    @property
    def captured(self) -> bool:
        """Whether the next step runs from graphs; also where no layer of this rank's is in the scope."""

    @property
    def graphs(self) -> int: ...

    @property
    def replays_per_step(self) -> int: ...

    @property
    def launches_per_step(self) -> int: ...

    def capture(self, batch: torch.Tensor) -> torch.Tensor:
        """The passes of the capture's step, captured before them, in them or after them. Returns their loss."""

    def release(self) -> None: ...


class Graphed:
    """Replays are expected of every step behind the capture's."""

    def __init__(self, settings: CudaGraph, schedule: Schedule, capture: Capture) -> None:
        self.capture_step = settings.capture_step
        self._settings = settings
        self._schedule = schedule
        self._capture = capture
        self._batch: torch.Tensor | None = None
        self._expected = 0

    def run(self, step: int, batch: torch.Tensor) -> Ran:
        if self._batch is not None:
            check_input("the batch", self._batch, batch)
            self._expected += self._capture.replays_per_step
            return Ran(self._schedule.run(batch), "steady")
        if step < self.capture_step:
            return Ran(self._schedule.run(batch), "warmup")
        try:
            loss = self._capture.capture(batch)
        except AssertionError as error:
            raise CaptureError(f"{self._named} refused to capture in step {step}: {error}") from error
        if not self._capture.captured:
            raise CaptureError(f"{self._named} captured nothing in step {step}")
        self._batch = batch
        return Ran(loss, "capture")

    @property
    def _named(self) -> str:
        settings, mechanism = self._settings, self._capture.mechanism
        return f"cuda_graph.impl={settings.impl}, scope=[{', '.join(settings.scope)}] ({mechanism})"

    def stats(self) -> GraphStats:
        capture = self._capture
        return GraphStats(
            impl=self._settings.impl,
            effective_scope=capture.scope,
            mechanism=capture.mechanism,
            graphs=capture.graphs,
            replays=capture.tally.replays,
            expected_replays=self._expected,
            launches_per_step=capture.launches_per_step,
            capture_seconds=capture.capture_seconds,
        )

    def close(self) -> None:
        self._capture.release()
