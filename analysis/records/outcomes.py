"""What the end of an attempt says of what was run, to whoever has several attempts before him."""

from __future__ import annotations

from launch.contract.outcomes import Outcome, OutcomeName

SAYS_NOTHING: tuple[OutcomeName, ...] = ("CANCELLED", "PREEMPTED", "NODE_FAIL")
"""Outcomes that tell of the scheduler or its user, and nothing of the run: an earlier attempt's result stands."""
OF_THE_RUN: tuple[OutcomeName, ...] = ("NUMERIC", "CAPTURE_FAILED", "CUDA_OOM", "HANG", "FAILED")
"""Outcomes that come of what was run; settings, time limits and the host's memory may be mended between attempts."""
FROM_OUTSIDE = ("SUPERVISOR", "JOB_GONE", "SIGKILL")
"""Failure classes of FAILED runs that somebody else may have ended."""


def is_uninformative(outcome: Outcome) -> bool:
    return outcome.outcome in SAYS_NOTHING or outcome.infrastructure


def failed_by_itself(outcome: Outcome) -> bool:
    """Whether it is a failure that the same code, libraries and data have made, and may make again."""
    own = outcome.outcome in OF_THE_RUN and outcome.failure_class not in FROM_OUTSIDE
    return own and not is_uninformative(outcome)
