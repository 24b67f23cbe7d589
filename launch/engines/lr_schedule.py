"""The learning rate of a step, the same in every engine."""

from __future__ import annotations

import math

from launch.contract.spec import Training


def learning_rate(training: Training, step: int) -> float:
    """The rate of ``step``, counted from 0: a linear warm-up that reaches the full rate with its last step, then
    constant, or a half cosine from the full rate down to ``min_learning_rate`` at ``steps``.
    """
    warmup, top, bottom = training.learning_rate_warmup_steps, training.learning_rate, training.min_learning_rate
    if step < warmup:
        return top * (step + 1) / warmup
    if training.learning_rate_schedule == "constant":
        return top
    progress = min(1.0, (step - warmup) / max(1, training.steps - warmup))
    return bottom + (top - bottom) * (1 + math.cos(math.pi * progress)) / 2
