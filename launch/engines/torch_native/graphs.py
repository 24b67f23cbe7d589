"""The graph implementations of this engine: which callable a step's micro-batches run through, and the evidence of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch._dynamo import utils
from torch._dynamo.exc import TorchDynamoException

from launch.engines.base import StepKind
from launch.engines.torch_native.model import Losses
from launch.errors import CaptureError
from launch.record import GraphStats
from launch.spec import RunSpec

Forward = Callable[[torch.Tensor], Losses]


class Graphs(Protocol):
    @property
    def capture_step(self) -> int | None: ...

    def step(self, number: int) -> AbstractContextManager[tuple[Forward, StepKind]]:
        """A context in which step ``number`` runs; it gives (forward, kind).

        Raises:
            CaptureError: on leaving, where what was to be captured could not be.
        """

    def stats(self) -> GraphStats: ...

    def close(self) -> None: ...


def make_graphs(spec: RunSpec, forward: Forward) -> Graphs:
    if spec.cuda_graph.impl == "none":
        return Eager(forward, spec.cuda_graph.warmup_steps)
    return Compiled(forward, spec.cuda_graph.warmup_steps, spec.num_microbatches)


class Eager:
    """Operations run one by one, as they are called."""

    capture_step = None

    def __init__(self, forward: Forward, warmup_steps: int) -> None:
        self._forward = forward
        self._warmup_steps = warmup_steps

    @contextmanager
    def step(self, number: int) -> Iterator[tuple[Forward, StepKind]]:
        yield self._forward, "warmup" if number < self._warmup_steps else "steady"

    def stats(self) -> GraphStats:
        return GraphStats(impl="none", mechanism="eager")

    def close(self) -> None:
        pass


class Compiled:
    """``torch.compile`` on a CPU: model and loss, forward and backward, compiled by Inductor in the capture step.

    A graph is a compiled frame and a replay its execution, counted by the backend in which Inductor is wrapped. Every
    micro-batch from the capture on must be one. Dynamo's own counters tell of frames compiled anew and of graph breaks.
    """

    def __init__(self, forward: Forward, warmup_steps: int, micro_batches: int) -> None:
        self.capture_step = warmup_steps
        self._eager = forward
        self._compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend=self._backend)
        self._micro_batches = micro_batches
        self._graphs = self._replays = self._expected = 0
        self._capture_seconds = 0.0
        self._before = _DynamoCounters.now()

    @contextmanager
    def step(self, number: int) -> Iterator[tuple[Forward, StepKind]]:
        if number < self.capture_step:
            yield self._eager, "warmup"
            return
        if number > self.capture_step:
            self._expected += self._micro_batches
            yield self._compiled, "steady"
            return
        self._before = _DynamoCounters.now()
        self._expected += self._micro_batches
        try:
            yield self._compiled, "capture"
        except TorchDynamoException as error:
            raise CaptureError(_capture_message(error)) from error
        self._capture_seconds = _DynamoCounters.now().seconds - self._before.seconds

    def stats(self) -> GraphStats:
        now = _DynamoCounters.now()
        frames = max(self._graphs, now.frames - self._before.frames)
        return GraphStats(
            impl="torch_compile",
            mechanism="compiled by Inductor without CUDA graphs (CPU)",
            graphs=self._graphs,
            replays=self._replays,
            expected_replays=self._expected,
            recompilations=max(0, frames - 1) + now.graph_breaks - self._before.graph_breaks,
            capture_seconds=self._capture_seconds,
        )

    def close(self) -> None:
        torch._dynamo.reset()

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        # Importing Inductor takes seconds, which an eager run should not pay.
        from torch._inductor.compile_fx import compile_fx

        self._graphs += 1
        compiled = cast(Callable[..., Any], compile_fx(graph, inputs))

        def run(*arguments: Any) -> Any:
            self._replays += 1
            return compiled(*arguments)

        return run


@dataclass(frozen=True)
class _DynamoCounters:
    """What Dynamo counts, for the whole process: frames compiled, graph breaks, seconds spent compiling."""

    frames: int
    graph_breaks: int
    seconds: float

    @classmethod
    def now(cls) -> _DynamoCounters:
        return cls(
            utils.counters["stats"]["unique_graphs"],
            sum(utils.counters["graph_break"].values()),
            utils.calculate_time_spent()["total_wall_time"],
        )


def _capture_message(error: Exception) -> str:
    first_line = next((line for line in str(error).splitlines() if line.strip()), "no message")
    return (
        f"cuda_graph.impl='torch_compile' could not compile the model: {type(error).__name__}: {first_line}; "
        f"see that a C++ compiler is installed, or set cuda_graph.impl=none"
    )
