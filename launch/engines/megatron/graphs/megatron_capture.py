"""The common base of Megatron-Core's graph implementations."""

from __future__ import annotations

import traceback
from abc import abstractmethod
from typing import Any

import torch

from launch.contract.errors import CaptureError
from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import GraphedStep, StepOutput
from launch.engines.megatron.schedule import Schedule


class MegatronCapture(GraphedStep):
    """Expects replays from the step after the capture on. The capture step has no replays, or they are not counted."""

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
        """Run the passes of the capture step, and capture before, during or after them. Return the loss, shape ()."""

    def capture(self, batch: torch.Tensor) -> StepOutput:
        settings = self._settings
        label = f"cuda_graph.impl={settings.impl}, scope=[{', '.join(settings.scope)}] ({self.mechanism})"
        try:
            loss = self.run_capture_step(batch)
        except AssertionError as error:
            # Some of Megatron-Core's assertions have no text. Then the asserting line says more.
            said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
            raise CaptureError(f"{label} refused to capture in step {self.capture_step}: {said}") from error
        if not self.is_captured:
            raise CaptureError(f"{label} captured nothing in step {self.capture_step}")
        return StepOutput(loss)
