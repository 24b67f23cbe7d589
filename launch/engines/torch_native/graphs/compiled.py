"""torch.compile: model and loss, forward and backward, compiled by Inductor; on CUDA in CUDA graphs (reduce-overhead)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._dynamo import utils
from torch._dynamo.exc import TorchDynamoException

from launch.engines.torch_native.graphs.base import Ran
from launch.engines.torch_native.iteration import Iteration
from launch.engines.torch_native.model import Losses, See
from launch.errors import CaptureError
from launch.record import GraphStats
from launch.spec import RunSpec


class Compiled:
    """A graph is a compiled frame and a replay its execution: every micro-batch from the capture step on must be one.
    Dynamo's own counters tell of frames compiled anew and of graph breaks.

    On a CPU the backend in which Inductor is wrapped counts executions. On CUDA Inductor's cudagraph trees run a frame
    twice before it is a CUDA graph: once for memory, once to record it.
    """

    def __init__(self, iteration: Iteration, spec: RunSpec) -> None:
        self.capture_step = spec.cuda_graph.warmup_steps
        self._iteration = iteration
        self._on_cuda = spec.placement.device == "cuda"
        how = {"mode": "reduce-overhead"} if self._on_cuda else {"backend": self._backend}
        self._compiled = torch.compile(iteration.whole, fullgraph=True, dynamic=False, **how)
        self._micro_batches = spec.num_microbatches
        self._graphs = self._replays = self._expected = 0
        self._capture_seconds = 0.0
        self._before = _DynamoCounters.now()

    def run(self, step: int, batch: torch.Tensor) -> Ran:
        if step < self.capture_step:
            return Ran(*self._iteration.run(batch), "warmup")
        self._expected += self._micro_batches
        if step > self.capture_step:
            return Ran(*self._iteration.run(batch), "steady")
        self._before = _DynamoCounters.now()
        self._iteration.whole = self._run_compiled
        try:
            loss = self._iteration.forward_backward(batch)
        except TorchDynamoException as error:
            raise CaptureError(_capture_message(error)) from error
        self._capture_seconds = _DynamoCounters.now().seconds - self._before.seconds
        return Ran(loss, self._iteration.update(), "capture")

    def _run_compiled(self, tokens: torch.Tensor, see: See) -> Losses:
        if self._on_cuda:
            # What the micro-batch before left in graph memory is not needed any more.
            torch.compiler.cudagraph_mark_step_begin()
            self._replays += 1
        return self._compiled(tokens, see)

    def stats(self) -> GraphStats:
        now = _DynamoCounters.now()
        frames = max(self._graphs, now.frames - self._before.frames)
        return GraphStats(
            impl="torch_compile",
            mechanism="compiled by Inductor, in CUDA graphs (reduce-overhead)"
            if self._on_cuda
            else "compiled by Inductor without CUDA graphs (CPU)",
            graphs=frames if self._on_cuda else self._graphs,
            replays=self._replays,
            expected_replays=self._expected,
            recompilations=max(0, frames - 1) + now.graph_breaks - self._before.graph_breaks,
            launches_per_step=2 * self._micro_batches if self._on_cuda else 0,
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
