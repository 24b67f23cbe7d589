"""The graph of Megatron-Core's optimizer: preparing gradients, their norm, clipping, the update, and the gather of parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from launch.engines.graph_protocol import ReplayCounter, replaced
from launch.engines.megatron.release import OptimizerCudaGraphWrapper
from launch.engines.megatron.schedule import to_scalar


class OptimizerGraph:
    """Wraps the optimizer's step in Megatron-Core's OptimizerCudaGraphWrapper, as Megatron-LM's training loop does.

    The wrapper counts steps. It captures in the first step after the warm-up, and replays from this step on. Its state is in
    class attributes, so a process can have one run (0.19.2 optimizer/optimizer_cuda_graph.py).
    """

    def __init__(self, optimizer: Any, warmup_steps: int) -> None:
        self._optimizer, self._uncaptured = optimizer, optimizer.step
        optimizer.step = OptimizerCudaGraphWrapper(optimizer.step, warmup_steps)

    @property
    def is_captured(self) -> bool:
        return OptimizerCudaGraphWrapper.cuda_graph is not None

    def step(self) -> torch.Tensor:
        """Update from the graph, or capture it first. Return the gradient norm before clipping, shape (). The caller owns it."""
        _, norm, _ = self._optimizer.step()
        return to_scalar(norm).clone()

    def count_replays(self, counter: ReplayCounter) -> None:
        graph: Any = OptimizerCudaGraphWrapper.cuda_graph
        graph.replay = counter.counting(graph.replay)

    def uncaptured(self) -> AbstractContextManager[None]:
        """Make the optimizer's step run without the graph inside the context."""
        return replaced(self._optimizer, "step", self._uncaptured)

    def close(self) -> None:
        if self.is_captured:
            OptimizerCudaGraphWrapper.cuda_graph.reset()
        OptimizerCudaGraphWrapper.cuda_graph = OptimizerCudaGraphWrapper.result = None
        OptimizerCudaGraphWrapper.curr_iteration = 0
        # The wrapper's destructor clears these attributes too, so the wrapper must not outlive its run.
        del self._optimizer.step
