"""One graph of a whole step: all microbatches, the reduction over ranks and, if the recipe says so, the optimizer."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import GraphedStep, StepOutput
from launch.engines.torch_native.compiled_model import forbid_compilation
from launch.engines.torch_native.microbatches import Microbatches
from launch.engines.torch_native.train_step import TrainStep


class FullIteration(GraphedStep):
    """Copies the batch into a static buffer before each replay, and copies loss and norm out afterwards.

    The learning rate is a tensor on the device. The warm-up has used every communicator, so all of them exist at the capture.
    """

    mechanism = "torch.cuda.graph around the step"
    launches_per_replay = 1

    def __init__(self, spec: RunSpec, train_step: TrainStep) -> None:
        super().__init__(spec, train_step.forward_backward)
        self.scope = ("forward_backward", "optimizer") if spec.cuda_graph.optimizer else ("forward_backward",)
        self._train_step = train_step
        self._as_compiled = forbid_compilation if spec.training.compile == "whole" else nullcontext
        self._graph = torch.cuda.CUDAGraph()
        self._static: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Microbatches] | None = None
        """Batch, loss, gradient norm and microbatches of the capture. All but the batch are graph memory. The norm is None
        without the optimizer."""
        self._keeps_routing = spec.step_checks > 0

    def capture(self, batch: torch.Tensor) -> StepOutput:
        """Capture the step, then replay it, because a capture executes nothing."""
        static_batch = batch.clone()
        with self._timing_capture():
            # Do as torch.cuda.graph does, but do not empty PyTorch's cache of pinned memory, which took two seconds.
            torch.cuda.empty_cache()
            with torch.cuda.stream(torch.cuda.Stream()), self._as_compiled():
                # thread_local, because NCCL's watchdog queries events from another thread during the capture.
                self._graph.capture_begin(capture_error_mode="thread_local")
                self._train_step.keep_routing = self._keeps_routing
                loss = self._train_step.forward_backward(static_batch)
                self._train_step.keep_routing = False
                norm = self._train_step.update() if self._settings.optimizer else None
                self._graph.capture_end()
        self._static = static_batch, loss, norm, self._train_step.microbatches
        self.graphs = self.replays_per_step = 1
        return self.replay(batch)

    def replay(self, batch: torch.Tensor) -> StepOutput:
        assert self._static is not None
        static_batch, loss, norm, self._train_step.microbatches = self._static
        static_batch.copy_(batch)
        self._graph.replay()
        self.counter.replays += 1
        # The next replay overwrites both.
        return StepOutput(loss.clone(), None if norm is None else norm.clone())

    def close(self) -> None:
        self._static = None
        self._graph.reset()
