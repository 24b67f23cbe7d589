"""Recognise a graphed run of a user's program that shows losses of other steps than its eager run, and trains as that does.

Each replay of a graph writes the loss to the same tensor. A program that shows this tensor a step late, or keeps it in a list
without a copy, shows losses of later steps. Its curve then differs by the program's log, and not by its graphs.
"""

from __future__ import annotations

import numpy as np

from analysis.pairing.precapture_check import capture_step
from analysis.records.steps import Floats, Integers, Steps
from analysis.verdict.curve_difference import sample_of
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins
from launch.contract.spec import RunSpec

FEWEST = 20
"""The fewest steps that show a pattern."""
MUCH_NEARER = 0.1
"""How near the losses of a neighbouring step must be, as a share of the distance of those of the same step."""
_FIX = "let both sides show each step's own loss: copy what a graph writes (loss.clone()) before the next replay"


def check_shown_losses(eager: Steps, graphed: Steps, spec: RunSpec, margins: Margins) -> Verdict | None:
    """Return INCOMPARABLE if a program's losses after the capture are those of other steps, although gradient norms agree at each."""
    if spec.engine != "command":
        return None
    window = slice(capture_step(graphed, spec) + 1, None)
    norms = sample_of("grad_norm", [eager], [graphed], window).largest
    if len(norms) < FEWEST or not (norms <= margins.grad_norm).all() or not eager.grad_norm[window].any():
        return None
    if not (shown := _describe(eager.loss[window], graphed.loss[window], eager.step[window], margins.loss)):
        return None
    reason = f"the graphed run shows other steps' losses, while gradient norms agree at each step: {shown}"
    return Verdict("INCOMPARABLE", reason, _FIX)


def _describe(eager: Floats, graphed: Floats, steps: Integers, margin: float) -> str:
    """Say which steps' losses ``graphed`` shows, if not those of its own steps; return "" if this is not clear."""
    apart = np.abs(graphed - eager)
    if not (largest := float(apart.max())) > margin:
        return ""
    if (graphed == graphed[0]).all() and not (eager == eager[0]).all():
        return f"all its losses are {graphed[0]:.9g} from step {steps[0]} on"
    # The last step has no later one, and a program may show it at its end.
    later, earlier = np.abs(graphed[:-1] - eager[1:]), np.abs(graphed[1:] - eager[:-1])
    for distances, place, which in ((later, 0, 1), (earlier, 1, -1)):
        if distances.max() <= min(margin, MUCH_NEARER * largest):
            step = steps[place]
            return f"its loss of step {step} ({graphed[place]:.9g}) is eager's of step {step + which}, and so on"
    return ""
