"""The protocol of graph implementations in both engines: capture a step, replay it, and report the evidence."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import torch

from launch.contract.errors import ReplayError
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import RunSpec
from launch.engines.protocol import StepKind

ForwardBackward = Callable[[torch.Tensor], torch.Tensor]
"""Runs all microbatches of a step and computes final gradients. Takes tokens, int64 (microbatches, microbatch size, sequence +
1). Returns the loss, shape (), which the caller owns."""


class StepOutput(NamedTuple):
    """Results of a step. The caller owns the tensors, which are never graph memory."""

    loss: torch.Tensor
    """Shape ()."""
    grad_norm: torch.Tensor | None = None
    """Shape (), if the graph also contains the optimizer. None if the optimizer has not run yet."""


class ReplayCounter:
    """Counts replays since the capture. For graphs of layers only the forward graph counts, because its backward graph follows.

    The counter is a separate object, so wrapped graphs hold no reference to the model.
    """

    def __init__(self) -> None:
        self.replays = 0

    def counting(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``replay`` that counts calls and keeps its attributes."""

        @wraps(replay)
        def counted(*inputs: Any, **named: Any) -> Any:
            self.replays += 1
            return replay(*inputs, **named)

        return counted


@dataclass(frozen=True)
class EagerStep:
    """Runs every step without graphs."""

    forward_backward: ForwardBackward
    warmup_steps: int
    recompilations: Callable[[], int] = lambda: 0
    capture_step: ClassVar[None] = None

    def run(self, step: int, batch: torch.Tensor) -> tuple[StepOutput, StepKind]:
        return StepOutput(self.forward_backward(batch)), "warmup" if step < self.warmup_steps else "steady"

    def stats(self) -> GraphStats:
        return GraphStats(impl="none", mechanism="eager", recompilations=self.recompilations())

    def close(self) -> None:
        pass


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Give an attribute of ``owner`` another value inside the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class GraphedStep(ABC):
    """Base of the graph implementations. It decides the kind of each step and counts replays.

    Attributes:
        mechanism: the mechanism of the capture in words, for the record.
        scope: the captured parts of a step, as GraphStats names them.
        replays_capture_step: whether the capture step itself runs from the graphs.
        graphs: the number of graphs or compiled functions. ``capture`` sets it.
        replays_per_step: the number of replays per step after the capture. ``capture`` sets it.
    """

    mechanism: str
    launches_per_replay = 2
    """Graph launches per counted replay: a forward and a backward graph."""
    scope: tuple[str, ...] = ()
    replays_capture_step = True

    def __init__(self, spec: RunSpec, forward_backward: ForwardBackward) -> None:
        self.capture_step = spec.cuda_graph.capture_step
        self.counter = ReplayCounter()
        self._settings = spec.cuda_graph
        self._microbatches = spec.num_microbatches
        self._forward_backward = forward_backward
        self._captured_batch: torch.Tensor | None = None
        self._expected_replays = 0
        self._capture_seconds = 0.0
        self.graphs = 0
        self.replays_per_step = 0

    @abstractmethod
    def capture(self, batch: torch.Tensor) -> StepOutput:
        """Capture the graphs, and run the capture step.

        Args:
            batch: int64 (microbatches, microbatch size, sequence + 1).

        Raises:
            CaptureError: the capture failed.
        """

    def replay(self, batch: torch.Tensor) -> StepOutput:
        """Run a step from the graphs, which are part of the forward and backward passes.

        Args:
            batch: int64 (microbatches, microbatch size, sequence + 1).
        """
        return StepOutput(self._forward_backward(batch))

    def counted_replay(self, batch: torch.Tensor) -> StepOutput:
        """Run a step from the graphs, and add its replays to the expected ones. A step check runs its step twice.

        Args:
            batch: int64 (microbatches, microbatch size, sequence + 1).
        """
        output = self.replay(batch)
        self._expected_replays += self.replays_per_step
        return output

    def uncaptured(self) -> AbstractContextManager[None]:
        """Make the passes run without the graphs inside the context."""
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Release the graphs and the communicators that they hold."""

    def run(self, step: int, batch: torch.Tensor) -> tuple[StepOutput, StepKind]:
        """Run step number ``step``, counted from 0.

        Args:
            batch: int64 (microbatches, microbatch size, sequence + 1).

        Raises:
            ReplayError: ``batch`` differs from the captured one in shape, dtype or device.
        """
        if step < self.capture_step:
            return StepOutput(self._forward_backward(batch)), "warmup"
        if self._captured_batch is not None:
            # Without this check, a replay would silently read a part of another batch, or Dynamo would recompile.
            check_input("the batch", self._captured_batch, batch)
            return self.counted_replay(batch), "steady"
        output = self.capture(batch)
        self._captured_batch = batch
        if self.replays_capture_step:
            self._expected_replays += self.replays_per_step
        return output, "capture"

    def stats(self) -> GraphStats:
        return GraphStats(
            impl=self._settings.impl,
            effective_scope=self.scope,
            mechanism=self.mechanism,
            graphs=self.graphs,
            replays=self.counter.replays,
            expected_replays=self._expected_replays,
            launches_per_step=self.launches_per_replay * self.replays_per_step,
            capture_seconds=self._capture_seconds,
        )

    @contextmanager
    def _timing_capture(self) -> Iterator[None]:
        """Measure the time of the capture. The device is idle at both ends, so earlier work does not count."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self._capture_seconds = time.perf_counter() - begun


StepRunner = EagerStep | GraphedStep


def check_input(name: str, captured: torch.Tensor, given: torch.Tensor) -> None:
    """Raise ReplayError if ``given`` differs from ``captured`` in shape, dtype or device."""
    for what in ("shape", "dtype", "device"):
        before, now = getattr(captured, what), getattr(given, what)
        if before != now:
            before, now = (tuple(before), tuple(now)) if what == "shape" else (before, now)
            raise ReplayError(
                f"{name} has {what} {now}, but was captured with {before}, and a replay repeats the capture"
            )
