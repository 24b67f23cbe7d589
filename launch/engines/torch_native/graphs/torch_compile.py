"""torch.compile: Inductor compiles model and loss, forward and backward; on CUDA in CUDA graphs (reduce-overhead)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch

from launch.contract.errors import CaptureError
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import GraphedStep, StepOutput, replaced
from launch.engines.torch_native.compiled_model import CompiledModel, compile_errors_as
from launch.engines.torch_native.decoder import Losses, ObserveOutput
from launch.engines.torch_native.train_step import TrainStep


class Compiled(GraphedStep):
    """Counts a compilation of the whole model as a graph, and an execution of the compiled code as a replay.

    Every microbatch from the capture step on must be a replay. With ``training.compile: whole`` the warm-up runs the same code,
    compiled without graphs. On a CPU, a backend that wraps Inductor counts executions. On CUDA, Inductor's cudagraph trees run
    a compiled function twice before it is a CUDA graph: once to warm up, once to record it.
    """

    def __init__(self, spec: RunSpec, train_step: TrainStep) -> None:
        super().__init__(spec, train_step.forward_backward)
        self._train_step = train_step
        self._on_cuda = spec.placement.device == "cuda"
        how = {"mode": "reduce-overhead"} if self._on_cuda else {"backend": self._backend}
        self._model = CompiledModel(train_step.chunks[0], **how)
        self._uncompiled = train_step.model
        self.launches_per_replay = 2 if self._on_cuda else 0
        self.mechanism = (
            "compiled by Inductor, in CUDA graphs (reduce-overhead)"
            if self._on_cuda
            else "compiled by Inductor without CUDA graphs (CPU)"
        )

    def capture(self, batch: torch.Tensor) -> StepOutput:
        self.replays_per_step = self._microbatches
        before = _seconds_compiling()
        self._uncompiled = self._train_step.model
        self._train_step.model = self._run_compiled
        with compile_errors_as("cuda_graph.impl='torch_compile'", CaptureError):
            loss = self._forward_backward(batch)
        self._capture_seconds = _seconds_compiling() - before
        return StepOutput(loss)

    def stats(self) -> GraphStats:
        return replace(super().stats(), graphs=self._model.compilations, recompilations=self._model.recompilations)

    def uncaptured(self) -> AbstractContextManager[None]:
        return replaced(self._train_step, "model", self._uncompiled)

    def close(self) -> None:
        torch._dynamo.reset()

    def _run_compiled(self, tokens: torch.Tensor, observe: ObserveOutput) -> Losses:
        if self._on_cuda:
            # The results of the previous microbatch in graph memory are no longer needed.
            torch.compiler.cudagraph_mark_step_begin()
            self.counter.replays += 1
        return self._model(tokens, observe)

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        # Import Inductor only here: it takes seconds, which an eager run should not pay.
        from torch._inductor.compile_fx import compile_fx

        compiled = cast(Callable[..., Any], compile_fx(graph, inputs))

        def run(*arguments: Any) -> Any:
            self.counter.replays += 1
            return compiled(*arguments)

        return run


def _seconds_compiling() -> float:
    """Return the time that Dynamo has spent compiling in this process."""
    # Import Dynamo only here: it takes as long as the rest of torch, which an eager run should not pay.
    from torch._dynamo import utils

    seconds: float = utils.calculate_time_spent()["total_wall_time"]
    return seconds
