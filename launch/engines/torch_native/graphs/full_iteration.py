"""One graph for a whole step: every micro-batch forward and backward, the reduction over ranks, and, where asked for,
clipping and the optimizer."""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch

from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import RunSpec
from launch.engines.protocol import StepKind
from launch.engines.torch_native.compiled_model import nothing_compiled
from launch.engines.torch_native.graphs.protocol import Ran, check_input
from launch.engines.torch_native.train_step import Iteration


class FullIteration:
    """The batch is copied into a static buffer before each replay, and loss and norm are copied out after it. The learning
    rate is a tensor on the device. Communicators exist: the warm-up has used each of them."""

    def __init__(self, iteration: Iteration, spec: RunSpec) -> None:
        self.capture_step = spec.cuda_graph.warmup_steps
        self._iteration = iteration
        self._with_optimizer = spec.cuda_graph.optimizer
        self._as_compiled = nothing_compiled if spec.training.compile == "whole" else nullcontext
        self._graph = torch.cuda.CUDAGraph()
        self._captured: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        self._replays = self._expected = 0
        self._capture_seconds = 0.0

    def run(self, step: int, batch: torch.Tensor) -> Ran:
        if step < self.capture_step:
            return Ran(*self._iteration.run(batch), "warmup")
        self._expected += 1
        kind: StepKind = "steady" if self._captured else "capture"
        static_batch, loss, norm = self._captured = self._captured or self._capture(batch)
        check_input("the batch", static_batch, batch)
        static_batch.copy_(batch)
        self._graph.replay()
        self._replays += 1
        return Ran(loss.clone(), self._iteration.update() if norm is None else norm.clone(), kind)

    def _capture(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        batch = batch.clone()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        # As torch.cuda.graph does, less the emptying of PyTorch's cache of pinned memory, seen to take two seconds.
        torch.cuda.empty_cache()
        with torch.cuda.stream(torch.cuda.Stream()), self._as_compiled():
            # thread_local: NCCL's watchdog asks the driver about events from a thread of its own.
            self._graph.capture_begin(capture_error_mode="thread_local")
            loss = self._iteration.forward_backward(batch)
            norm = self._iteration.update() if self._with_optimizer else None
            self._graph.capture_end()
        torch.cuda.synchronize()
        self._capture_seconds = time.perf_counter() - begun
        return batch, loss, norm

    def stats(self) -> GraphStats:
        graphs = int(self._captured is not None)
        return GraphStats(
            impl="full_iteration",
            effective_scope=("forward_backward", "optimizer") if self._with_optimizer else ("forward_backward",),
            mechanism="torch.cuda.graph around the step",
            graphs=graphs,
            replays=self._replays,
            expected_replays=self._expected,
            launches_per_step=graphs,
            capture_seconds=self._capture_seconds,
        )

    def close(self) -> None:
        self._captured = None
        self._graph.reset()
