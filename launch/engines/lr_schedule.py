"""The learning rate of a step, for every engine."""

from __future__ import annotations

import math

from launch.contract.spec import Training


def learning_rate(training: Training, step: int) -> float:
    """Return the learning rate of ``step``, counted from 0.

    A linear warm-up reaches the full rate in its last step. Then the rate is constant, or falls by half a cosine to
    ``min_learning_rate`` at ``steps``.
    """
    warmup, top, bottom = training.learning_rate_warmup_steps, training.learning_rate, training.min_learning_rate
    if step < warmup:
        return top * (step + 1) / warmup
    if training.learning_rate_schedule == "constant":
        return top
    progress = min(1.0, (step - warmup) / max(1, training.steps - warmup))
    return bottom + (top - bottom) * (1 + math.cos(math.pi * progress)) / 2
