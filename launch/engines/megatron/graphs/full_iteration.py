"""One graph of a step's passes: all microbatches and the reduction over ranks. The optimizer runs after it, or has its own graph."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import StepOutput, replaced
from launch.engines.megatron.graphs.megatron_capture import MegatronCapture
from launch.engines.megatron.graphs.optimizer_graph import OptimizerGraph
from launch.engines.megatron.observed_router import routers_of
from launch.engines.megatron.schedule import Schedule


class FullIteration(MegatronCapture):
    """Wraps Megatron-Core's schedule in its FullCudaGraphWrapper.

    The wrapper copies each microbatch into a static buffer on its own stream. In 0.16.1 that stream waits for no other. A
    replay ends before the next copy only because the host reads the gradient norm in between. The wrapper's state is in class
    attributes, so a process can have one run (full_cuda_graph.py).
    """

    mechanism = "FullCudaGraphWrapper, one graph of a step's forward and backward passes"
    launches_per_replay = 1

    def __init__(self, spec: RunSpec, schedule: Schedule, optimizer: Any) -> None:
        super().__init__(spec, schedule, optimizer)
        self._uncaptured = schedule.forward_backward
        schedule.forward_backward = FullCudaGraphWrapper(schedule.forward_backward, spec.cuda_graph.warmup_steps)
        self._update = OptimizerGraph(optimizer, spec.cuda_graph.warmup_steps) if spec.cuda_graph.optimizer else None
        self.scope = ("forward_backward", "optimizer") if self._update else ("forward_backward",)
        if self._update:
            self.mechanism = f"{self.mechanism}, and OptimizerCudaGraphWrapper, one graph of the optimizer"

    @property
    def _graph(self) -> Any:
        return FullCudaGraphWrapper.cuda_graph["training"]

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def capture(self, batch: torch.Tensor) -> StepOutput:
        return self._with_update(super().capture(batch).loss)

    def replay(self, batch: torch.Tensor) -> StepOutput:
        return self._with_update(super().replay(batch).loss)

    def _with_update(self, loss: torch.Tensor) -> StepOutput:
        """Run the optimizer from its graph if it has one, and count the graph when it is captured."""
        if self._update is None:
            return StepOutput(loss)
        begun, was_captured = time.perf_counter(), self._update.is_captured
        norm = self._update.step()
        if not was_captured:
            # The capture waits for the device at both ends. Its first replay is only enqueued here.
            self._capture_seconds += time.perf_counter() - begun
            self._update.count_replays(self.counter)
            self.graphs = self.replays_per_step = 2
        return StepOutput(loss, norm)

    def run_capture_step(self, batch: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        loss = self._schedule.run(batch)
        # Do not wait for the device, because the first replay follows the capture and is only enqueued here.
        self._capture_seconds = time.perf_counter() - begun
        if self.is_captured:
            self.graphs = self.replays_per_step = 1
            self._graph.replay = self.counter.counting(self._graph.replay)
            for router in (router for chunk in self._schedule.chunks for router in routers_of(chunk)):
                self._graph.replay = router.keeping_captured(slice(None), self._graph.replay)
        return loss

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        with (
            replaced(self._schedule, "forward_backward", self._uncaptured),
            nullcontext() if self._update is None else self._update.uncaptured(),
        ):
            yield

    def close(self) -> None:
        if self._update is not None:
            self._update.close()
        if self.is_captured:
            self._graph.reset()
        FullCudaGraphWrapper.cuda_graph["training"] = None
        FullCudaGraphWrapper.result["training"] = None
        FullCudaGraphWrapper.curr_iteration["training"] = 0
        StaticBufferLoader.static_buffers["training"] = []
