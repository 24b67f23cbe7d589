"""One graph of a step: all microbatches, forward and backward, and the reduction over ranks. The optimizer runs after it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import replaced
from launch.engines.megatron.graphs.megatron_capture import MegatronCapture
from launch.engines.megatron.schedule import Schedule


class FullIteration(MegatronCapture):
    """Wraps Megatron-Core's schedule in its FullCudaGraphWrapper.

    The wrapper copies each microbatch into a static buffer on its own stream. In 0.16.1 that stream waits for no other. A
    replay ends before the next copy only because the host reads the gradient norm in between. The wrapper's state is in class
    attributes, so a process can have one run (full_cuda_graph.py).
    """

    mechanism = "FullCudaGraphWrapper, one graph of a step's forward and backward passes"
    scope = ("forward_backward",)
    launches_per_replay = 1

    def __init__(self, spec: RunSpec, schedule: Schedule, optimizer: Any) -> None:
        super().__init__(spec, schedule, optimizer)
        self._uncaptured = schedule.forward_backward
        schedule.forward_backward = FullCudaGraphWrapper(schedule.forward_backward, spec.cuda_graph.warmup_steps)

    @property
    def _graph(self) -> Any:
        return FullCudaGraphWrapper.cuda_graph["training"]

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def run_capture_step(self, batch: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        loss = self._schedule.run(batch)
        # Do not wait for the device, because the first replay follows the capture and is only enqueued here.
        self._capture_seconds = time.perf_counter() - begun
        if self.is_captured:
            self.graphs = self.replays_per_step = 1
            self._graph.replay = self.counter.counting(self._graph.replay)
        return loss

    def uncaptured(self) -> AbstractContextManager[None]:
        return replaced(self._schedule, "forward_backward", self._uncaptured)

    def close(self) -> None:
        if self.is_captured:
            self._graph.reset()
        FullCudaGraphWrapper.cuda_graph["training"] = None
        FullCudaGraphWrapper.result["training"] = None
        FullCudaGraphWrapper.curr_iteration["training"] = 0
        StaticBufferLoader.static_buffers["training"] = []
