"""Recognise runs of which one side shows losses of other steps, and which train alike.

Each replay of a graph writes the loss to the same tensor. A program that shows this tensor a step late, or keeps it in a list
without a copy, shows losses of later steps. Its curve then differs by the program's log, and not by its graphs. A fault such as
a lost update shifts the losses of one batch too, but also the gradient norms.
"""

from __future__ import annotations

import numpy as np

from analysis.records.steps import Floats, Steps
from analysis.verdict.curve_difference import sample_of
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins

FEWEST = 20
"""The fewest steps that show a pattern."""
MUCH_NEARER = 0.1
"""How near the losses of a neighbouring step must be, as a share of the distance of those of the same step."""
NEARER = 0.5
"""How near the gradient norms of the same step must be, as a share of the distance of those of a neighbouring one."""
LEAST_RISES = 0.25
"""The share of steps in which a loss rises if batches change. Without gradient norms, only changing batches tell a log from a fault."""
_FIX = "let both sides show each step's own loss: copy what a graph writes (loss.clone()) before the next replay"


def check_shown_losses(
    eager: Steps, graphed: Steps, first: int, margins: Margins, *, with_norms: bool = True
) -> Verdict | None:
    """Return INCOMPARABLE if the losses from index ``first`` on are those of other steps, while gradient norms agree at each.

    ``with_norms``: whether gradient norms are known.
    """
    if not np.array_equal(eager.step, graphed.step) or len(eager) - first < FEWEST:
        return None
    window = slice(first, None)
    before, after = eager.loss[window], graphed.loss[window]
    if not np.abs(after - before).max() > margins.loss:
        return None
    which = _other_step(before, after, margins.loss)
    if with_norms:
        norms = sample_of("grad_norm", [eager], [graphed], window).largest
        agree = (norms <= margins.grad_norm).all() and _same_steps(eager.grad_norm[window], graphed.grad_norm[window])
    else:
        agree = (np.diff(before) > 0).mean() >= LEAST_RISES
    steps = eager.step[window]
    if not agree or not (which or (with_norms and _is_stuck(before, after))):
        return None
    if which:
        at = max(-which, 0)
        shown = f"its loss of step {steps[at]} ({after[at]:.9g}) is eager's of step {steps[at + which]}, and so on"
    else:
        shown = f"all its losses are {after[0]:.9g} from step {steps[0]} on"
    known = ", while gradient norms agree at each step" if with_norms else ""
    return Verdict("INCOMPARABLE", f"the graphed run shows other steps' losses{known}: {shown}", _FIX)


def _other_step(eager: Floats, graphed: Floats, margin: float) -> int:
    """Return 1 or -1 if ``graphed`` shows the losses of the next or the previous step, or 0 if this is not clear."""
    # The last step has no later one, and a program may show it at its end.
    later, earlier = np.abs(graphed[:-1] - eager[1:]).max(), np.abs(graphed[1:] - eager[:-1]).max()
    near = min(margin, MUCH_NEARER * np.abs(graphed - eager).max())
    return 1 if later <= near else -1 if earlier <= near else 0


def _is_stuck(eager: Floats, graphed: Floats) -> bool:
    return bool((graphed == graphed[0]).all() and not (eager == eager[0]).all())


def _same_steps(eager: Floats, graphed: Floats) -> bool:
    """Return whether ``graphed`` is nearer to ``eager`` at each step than at the neighbouring ones."""
    apart = np.abs(graphed - eager).max()
    elsewhere = min(np.abs(graphed[:-1] - eager[1:]).max(), np.abs(graphed[1:] - eager[:-1]).max())
    return bool(apart <= NEARER * elsewhere and elsewhere > 0)
