"""One optimizer step of a run: a line of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.common.atomic_files import number
from launch.contract.records.events import StepPhase


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. ``loss`` is the global batch's mean in nats per token. ``grad_norm`` is the norm before clipping."""

    step: int
    loss: float
    grad_norm: float
    step_time_ms: float
    tokens: int
    phase: StepPhase


def step_from_json(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of metrics.jsonl with NaN and the infinities as numbers."""
    return {**line, **{key: number(line[key]) for key in ("loss", "grad_norm", "step_time_ms")}}
