"""What Megatron-Core's graph implementations have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from launch.contract.errors import CaptureError
from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import GraphedStep, StepOutput
from launch.engines.megatron.schedule import Schedule


class MegatronCapture(GraphedStep):
    """Expects replays from the step after the capture on: the capture step itself runs without them or is not counted."""

    replays_capture_step = False

    def __init__(self, spec: RunSpec, schedule: Schedule, optimizer: Any) -> None:
        super().__init__(spec, schedule.run)
        self._schedule = schedule

    @property
    @abstractmethod
    def is_captured(self) -> bool:
        """Whether the next step runs from graphs; also true if no layer of this rank is in the scope."""

    @abstractmethod
    def run_capture_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the capture step's passes, and capture before, in or after them. Return the loss, shape ()."""

    def capture(self, batch: torch.Tensor) -> StepOutput:
        settings = self._settings
        label = f"cuda_graph.impl={settings.impl}, scope=[{', '.join(settings.scope)}] ({self.mechanism})"
        try:
            loss = self.run_capture_step(batch)
        except AssertionError as error:
            raise CaptureError(f"{label} refused to capture in step {self.capture_step}: {error}") from error
        if not self.is_captured:
            raise CaptureError(f"{label} captured nothing in step {self.capture_step}")
        return StepOutput(loss)
