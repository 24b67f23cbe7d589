"""Make the outcome of an attempt from a diagnosis, or from the end of a Slurm job. Pure."""

from __future__ import annotations

from launch.common.redact import redact
from launch.contract.outcomes import Outcome
from launch.failures.classes import LAUNCH, FailureClass
from launch.failures.diagnose import Diagnosis, Evidence, diagnose, diagnose_as


def make_outcome(
    diagnosis: Diagnosis, allocation: str, started: float, ended: float, node: str = "", exit_code: int | None = None
) -> Outcome:
    """Return the record of an attempt. Times are in seconds since the epoch."""
    found = {**vars(diagnosis), "message": redact(diagnosis.message)}
    return Outcome(**found, allocation=allocation, started=started, ended=ended, node=node, exit_code=exit_code)


def outcome_of_job(evidence: Evidence, nodes: str, allocation: str, started: float, now: float) -> Outcome:
    """Return the outcome of an attempt whose supervisor wrote none, because Slurm ended it with the job.

    The ranks' records decide if they explain the end; otherwise the job's state decides. ``nodes`` are the job's nodes, as
    Slurm writes them.
    """
    diagnosis = diagnose(evidence)
    # Slurm does not report which of several nodes failed.
    node = nodes if diagnosis.outcome == "NODE_FAIL" and not set(nodes) & set("[,") else ""
    return make_outcome(diagnosis, allocation, started, now, node=node)


def unstarted_outcome(failure: FailureClass, message: str, now: float) -> Outcome:
    """Return the outcome of an attempt that no job will start any more."""
    return make_outcome(diagnose_as(failure, "init", message), "", now, now)


def never_started(outcome: Outcome) -> bool:
    """Return whether several jobs in a row ended without starting the run. Another job would not start it either."""
    return outcome.failure_class == LAUNCH.name and not outcome.allocation
