"""torch.compile: model and loss, forward and backward, compiled by Inductor; on CUDA in CUDA graphs (reduce-overhead)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch._dynamo import utils

from launch.contract.errors import CaptureError
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import RunSpec
from launch.engines.torch_native.compiled_model import CompiledModel, failing_to_compile
from launch.engines.torch_native.decoder import Losses, See
from launch.engines.torch_native.graphs.protocol import Ran, check_input
from launch.engines.torch_native.train_step import Iteration


class Compiled:
    """A graph is a compilation of the whole and a replay its execution: every micro-batch from the capture step on must be
    one. With ``training.compile: whole`` the warm-up runs the same code, compiled without graphs.

    On a CPU the backend in which Inductor is wrapped counts executions. On CUDA Inductor's cudagraph trees run a compiled
    function twice before it is a CUDA graph: once for memory, once to record it.
    """

    def __init__(self, iteration: Iteration, spec: RunSpec) -> None:
        self.capture_step = spec.cuda_graph.warmup_steps
        self._iteration = iteration
        self._on_cuda = spec.placement.device == "cuda"
        how = {"mode": "reduce-overhead"} if self._on_cuda else {"backend": self._backend}
        self._whole = CompiledModel(iteration.chunks[0], **how)
        self._micro_batches = spec.num_microbatches
        self._batch: torch.Tensor | None = None
        self._replays = self._expected = 0
        self._capture_seconds = 0.0

    def run(self, step: int, batch: torch.Tensor) -> Ran:
        if step < self.capture_step:
            return Ran(*self._iteration.run(batch), "warmup")
        self._expected += self._micro_batches
        self._batch = batch if self._batch is None else self._batch
        # Another shape would be compiled anew, and the run end well without proof.
        check_input("the batch", self._batch, batch)
        if step > self.capture_step:
            return Ran(*self._iteration.run(batch), "steady")
        before = _seconds_compiling()
        self._iteration.whole = self._run_compiled
        with failing_to_compile("cuda_graph.impl='torch_compile'", CaptureError):
            loss = self._iteration.forward_backward(batch)
        self._capture_seconds = _seconds_compiling() - before
        return Ran(loss, self._iteration.update(), "capture")

    def _run_compiled(self, tokens: torch.Tensor, see: See) -> Losses:
        if self._on_cuda:
            # What the micro-batch before left in graph memory is not needed any more.
            torch.compiler.cudagraph_mark_step_begin()
            self._replays += 1
        return self._whole(tokens, see)

    def stats(self) -> GraphStats:
        return GraphStats(
            impl="torch_compile",
            mechanism="compiled by Inductor, in CUDA graphs (reduce-overhead)"
            if self._on_cuda
            else "compiled by Inductor without CUDA graphs (CPU)",
            graphs=self._whole.compilations,
            replays=self._replays,
            expected_replays=self._expected,
            recompilations=self._whole.recompilations,
            launches_per_step=2 * self._micro_batches if self._on_cuda else 0,
            capture_seconds=self._capture_seconds,
        )

    def close(self) -> None:
        torch._dynamo.reset()

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        # Importing Inductor takes seconds, which an eager run should not pay.
        from torch._inductor.compile_fx import compile_fx

        compiled = cast(Callable[..., Any], compile_fx(graph, inputs))

        def run(*arguments: Any) -> Any:
            self._replays += 1
            return compiled(*arguments)

        return run


def _seconds_compiling() -> float:
    """What Dynamo says of this process."""
    seconds: float = utils.calculate_time_spent()["total_wall_time"]
    return seconds
