"""Whether the eager runs learn. Curves of a model that does not learn say little about graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.records.steps import Floats, Steps
from analysis.statistics.random_walk import fall_of
from launch.contract.records.step_metrics import Metric


def describe_no_fall(losses: Floats, margin: float) -> str:
    """Describe why ``losses``, shape (steps,), do not show learning of more than ``margin``; return "" if they do.

    Losses vary from batch to batch, and batches may depend on each other. The loss of a model that does not learn may then move
    like a random walk.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        fall, half_width = fall_of(losses)
    if fall - half_width > margin:
        return ""
    return (
        f"the eager loss falls by {fall:.3g} +- {half_width:.3g} from the first part of the window to the last; the variation "
        f"between batches hides whether it learns more than the margin of {margin:g}"
    )


def describe_untrained(eager: Sequence[Steps], first: int, metrics: Sequence[Metric], margin: float) -> str:
    """Describe why the eager runs did not train from index ``first`` on; return "" if they did.

    They did not train if their mean loss moves by at most ``margin``, or if all their gradient norms are 0.
    """
    losses = np.mean([steps.loss[first:] for steps in eager], axis=0)
    moved = float(np.ptp(losses))
    if len(losses) > 1 and not moved > margin:
        moves = f"moves by no more than {moved:.3g}" if moved else "does not move"
        return f"the eager loss {moves} over the window, so the model hardly trains"
    if "grad_norm" in metrics and not any(steps.grad_norm[first:].any() for steps in eager):
        return "the eager gradient norm is 0 at every step, so the model does not train"
    return ""
