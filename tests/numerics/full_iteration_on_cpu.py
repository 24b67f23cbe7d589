"""Imitate a graph of the whole step without a GPU: a replay runs the captured code again, on the static batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import StepOutput
from launch.engines.torch_native.graphs import IMPLEMENTATIONS
from launch.engines.torch_native.graphs.full_iteration import FullIteration
from launch.engines.torch_native.train_step import TrainStep


class FullIterationOnCpu(FullIteration):
    def __init__(self, spec: RunSpec, train_step: TrainStep) -> None:
        with mock.patch.object(torch.cuda, "CUDAGraph", mock.Mock):
            super().__init__(spec, train_step)
        self.batch = torch.empty(0)

    def capture(self, batch: torch.Tensor) -> StepOutput:
        self.batch = batch.clone()
        self.graphs = self.replays_per_step = 1
        return self.replay(batch)

    def replay(self, batch: torch.Tensor) -> StepOutput:
        self.batch.copy_(batch)
        loss = self._train_step.forward_backward(self.batch)
        norm = self._train_step.update() if self._settings.optimizer else None
        self.counter.replays += 1
        return StepOutput(loss, norm)


@contextmanager
def full_iteration_on_cpu() -> Iterator[None]:
    with mock.patch.dict(IMPLEMENTATIONS, {"full_iteration": FullIterationOnCpu}):
        yield
