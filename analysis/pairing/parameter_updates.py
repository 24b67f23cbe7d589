"""Check that the optimizers of a pair change parameters after the capture, by digests that each rank recorded.

At a low learning rate, the loss does not show that a graphed optimizer never steps, because losses vary more from batch to
batch.
"""

from __future__ import annotations

from analysis.records.run import Attempt
from analysis.verdict.verdict import Verdict
from launch.common.text import numbered

_CAPTURE = "capture without the optimizer, and check whether a replay updates the parameters that it captured"
_TRAIN = "set a learning rate above 0 for the steps after the capture (training.learning_rate), or train for more steps"


def check_updates(eager: Attempt, graphed: Attempt) -> Verdict | None:
    """Return DIVERGED if a rank's parameters change only in the eager run, INCOMPARABLE if no rank's parameters change."""
    unchanged = [rank for rank, changes in sorted(graphed.updates.items()) if not changes]
    if stuck := [rank for rank in unchanged if eager.updates.get(rank)]:
        ranks = numbered("rank", stuck)
        reason = f"the graphed optimizer does not step: the parameters of {ranks} are the same after the capture and at the end"
        return Verdict("DIVERGED", f"{reason}, but the eager ones change", _CAPTURE)
    if unchanged and not any((*eager.updates.values(), *graphed.updates.values())):
        return Verdict(
            "INCOMPARABLE", "neither run changes any parameter after the capture, so nothing is learnt", _TRAIN
        )
    return None


def both_update(eager: Attempt, graphed: Attempt) -> bool:
    """Return whether both runs are known to change parameters after the capture."""
    return all(attempt.updates and all(attempt.updates.values()) for attempt in (eager, graphed))
