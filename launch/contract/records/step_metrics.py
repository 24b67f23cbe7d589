"""One optimizer step of a run: a line of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from launch.common.atomic_files import dumps, number
from launch.contract.errors import NumericError
from launch.contract.records.events import StepPhase

Metric = Literal["loss", "grad_norm"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. ``loss`` is the global batch's mean in nats per token. ``grad_norm`` is the norm before clipping.

    It is 0 if a gradient scaler of a user's program skipped the step.
    """

    step: int
    loss: float
    grad_norm: float
    step_time_ms: float
    tokens: int
    phase: StepPhase

    def check(self) -> None:
        """Raise NumericError if the loss or gradient norm is not finite."""
        for name, value in (("loss", self.loss), ("grad_norm", self.grad_norm)):
            if not math.isfinite(value):
                raise NumericError(f"{name} is {value} at step {self.step} (phase {self.phase})")

    def line(self) -> str:
        """Return what ``dumps`` returns, in a third of its time, because every step pays it."""
        if not math.isfinite(self.loss + self.grad_norm + self.step_time_ms):
            return dumps(self)
        return (
            f'{{"step": {self.step}, "loss": {self.loss!r}, "grad_norm": {self.grad_norm!r}, '
            f'"step_time_ms": {self.step_time_ms!r}, "tokens": {self.tokens}, "phase": "{self.phase}"}}'
        )


def step_from_json(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl with NaN and the infinities as numbers."""
    return {**line, **{key: number(line[key]) for key in ("loss", "grad_norm", "step_time_ms")}}
