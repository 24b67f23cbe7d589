"""From what was seen of an attempt to its outcome: class, phase, first failing rank and remedy. Pure.

What is seen: exceptions that ranks recorded, exit codes of ranks, the phase that each had entered, whether the
supervisor ended the attempt itself, and what Slurm says where ranks do not explain their end. The first exception in
time is the cause; what other ranks say after it (a closed connection, a cancelled collective) is a consequence and is
passed over.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

from launch.contract.outcomes import OutcomeName
from launch.contract.records.events import Phase
from launch.failures import classes
from launch.failures.classes import FailureClass, classify
from launch.slurm.job_states import OUTCOME_OF_STATE

EndedBy = Literal["itself", "cancel", "deadline", "hang", "job"]
"""Who ended an attempt; "job" is Slurm, which ends the whole job."""


@dataclass(frozen=True)
class RankException:
    """An exception as a rank recorded it. ``time`` is in seconds since the epoch."""

    rank: int
    time: float
    phase: Phase
    type: str
    message: str


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended: an exit code, or minus the signal that ended it."""

    rank: int
    code: int
    time: float | None = None
    """In seconds since the epoch, None where nobody noted it."""
    node: str = ""
    oom_killed: bool = False
    """Whether the kernel's memory killer struck where it ran, while it ran."""


@dataclass(frozen=True)
class Evidence:
    """All that is known of an attempt that has ended. What ranks said after the supervisor began to end them is not."""

    ended_by: EndedBy
    exit_code: int
    """Of what started the ranks; 0 where that had not ended."""
    phases: Mapping[int, Phase]
    """The last phase that each rank entered."""
    exceptions: tuple[RankException, ...] = ()
    exits: tuple[RankExit, ...] = ()
    """Ranks that failed, the first one first."""
    limit_seconds: float = 0.0
    job_state: str = ""
    """Of the attempt's job, where that has ended."""
    over_memory: str = ""
    """In words, the memory of the attempt's step where Slurm ended it for that."""
    disk_full: str = ""
    """In words, why the supervisor could not write what became of the attempt; then ranks could not either."""

    @property
    def phase(self) -> Phase:
        return self.phases.get(0, "init")

    @property
    def results_intact(self) -> bool:
        """Rank 0 writes metrics, and enters the teardown when the last of them is on disk."""
        return self.phase == "teardown"

    @property
    def exits_of_their_own(self) -> tuple[RankExit, ...]:
        """Without ranks that were ended (SIGTERM) because another had failed before them (srun --kill-on-bad-exit)."""
        first = min((e.time for e in self.exits if e.time is not None), default=0.0)
        return tuple(e for e in self.exits if e.code != -signal.SIGTERM or e.time is None or e.time <= first)


@dataclass(frozen=True)
class Diagnosis:
    outcome: OutcomeName
    phase: Phase
    rank: int | None = None
    failure_class: str = ""
    message: str = ""
    remedy: str = ""
    infrastructure: bool = False


# What other ranks say when one has gone: consequences, not causes.
_SECONDARY = re.compile(
    r"Connection (closed|reset) by peer|DistBackendError|cudaErrorStreamCaptureInvalidated|SIGTERM|Broken pipe"
)


def diagnose(evidence: Evidence) -> Diagnosis:
    """The outcome of an attempt from what was seen of it."""
    if evidence.results_intact:
        return _after_results(evidence)
    if evidence.ended_by == "cancel":
        return diagnose_as(classes.CANCELLED, evidence.phase, "cancelled while it ran")
    exception = first_exception(evidence.exceptions)
    if exception is not None and not _is_consequence(exception, evidence):
        return _from_exception(exception)
    if evidence.ended_by == "job":
        return diagnose_job_end(evidence.job_state, evidence.phase)
    return _without_cause(evidence, exception)


def is_explained(evidence: Evidence) -> bool:
    """Whether the attempt itself says why it ended. Where it does not, Slurm may have ended it."""
    if evidence.ended_by == "job":
        return False
    exception = first_exception(evidence.exceptions)
    completed = evidence.results_intact and evidence.exit_code == 0
    return evidence.ended_by != "itself" or completed or (exception is not None and not _is_communication(exception))


def without_spec(error: Exception) -> Diagnosis:
    """Of an attempt whose spec cannot be read: nothing of it was started."""
    return diagnose_as(classes.SPEC, "init", f"spec.json cannot be read: {type(error).__name__}: {error}")


def diagnose_job_end(state: str, phase: Phase, message: str = "") -> Diagnosis:
    """Of an attempt in ``phase`` whose job ended in ``state``, and that nobody else ended.

    ``state`` is one of Slurm's (launch/slurm/job_states.py), "REQUEUED" of a job that was put back into the queue under
    the attempt, or "GONE" of one of which squeue and sacct know nothing any more.

    Raises:
        ValueError: a job in ``state`` has not ended.
    """
    if state not in _OF_STATE:
        raise ValueError(f"a job in state {state!r} has not ended")
    if phase == "teardown":
        return Diagnosis("COMPLETED", phase, message=f"its job ended ({state}) in its teardown, after its last result")
    failure, words = _OF_STATE[state]
    return diagnose_as(failure, phase, message or words)


def first_exception(exceptions: tuple[RankException, ...]) -> RankException | None:
    """The earliest exception that is not a consequence of another rank's; the earliest of all where each is."""
    ordered = sorted(exceptions, key=lambda exception: (exception.time, exception.rank))
    primary = [exception for exception in ordered if not _is_secondary(exception)]
    return next(iter(primary or ordered), None)


_OF_OUTCOME: dict[OutcomeName, FailureClass] = {
    "CANCELLED": classes.CANCELLED,
    "FAILED": classes.SUPERVISOR,
    "HOST_OOM": classes.STEP_MEMORY,
    "NODE_FAIL": classes.NODE_FAIL,
    "PREEMPTED": classes.PREEMPTED,
    "TIMEOUT": classes.JOB_TIMEOUT,
}
_OF_STATE: dict[str, tuple[FailureClass, str]] = {
    **{state: (_OF_OUTCOME[outcome], f"its job ended as {state}") for state, outcome in OUTCOME_OF_STATE.items()},
    "REQUEUED": (classes.REQUEUED, "its job was put back into the queue, and began again"),
    "GONE": (classes.JOB_GONE, "its job left the queue, and neither squeue nor sacct knows how it ended"),
}


def _is_secondary(exception: RankException) -> bool:
    """Ranks fail to reach one that has gone, and one that was never there: a cause only where nothing else is known."""
    row = classify(exception.type, exception.message, exception.phase)
    setup = row is not None and row.name == "COMMUNICATOR_SETUP"
    return setup or bool(_SECONDARY.search(f"{exception.type}: {exception.message}"))


def _is_communication(exception: RankException) -> bool:
    row = classify(exception.type, exception.message, exception.phase)
    return _is_secondary(exception) or (row is not None and row.name == "COMMUNICATION")


def _is_consequence(exception: RankException, evidence: Evidence) -> bool:
    """Where Slurm ended the job, ranks on other nodes may say anything of those that went before them."""
    return _is_communication(exception) if evidence.ended_by == "job" else _is_secondary(exception)


def diagnose_as(failure: FailureClass, phase: Phase, message: str, rank: int | None = None) -> Diagnosis:
    """Return the diagnosis that is one row of the table of failures."""
    return Diagnosis(failure.outcome, phase, rank, failure.name, message, failure.remedy, failure.infrastructure)


def _after_results(evidence: Evidence) -> Diagnosis:
    if evidence.ended_by == "cancel":
        return Diagnosis("COMPLETED", "teardown", message="cancelled in its teardown, after its last result")
    if evidence.ended_by == "job":
        return diagnose_job_end(evidence.job_state, "teardown")
    if evidence.ended_by != "itself":
        return diagnose_as(classes.TEARDOWN_HANG, "teardown", "results are on disk, but the processes did not end")
    exception, first = first_exception(evidence.exceptions), next(iter(evidence.exits), None)
    if exception is not None:
        return diagnose_as(classes.TEARDOWN_CRASH, "teardown", f"{exception.type}: {exception.message}", exception.rank)
    if evidence.exit_code == 0:
        return Diagnosis("COMPLETED", "teardown")
    code, rank = (first.code, first.rank) if first else (evidence.exit_code, None)
    return diagnose_as(classes.TEARDOWN_CRASH, "teardown", f"{_exit_words(code)} after the results were on disk", rank)


def _without_cause(evidence: Evidence, consequence: RankException | None) -> Diagnosis:
    """Of an attempt in which no rank said what was wrong; at most what it made of another's end."""
    if evidence.over_memory:
        return diagnose_as(classes.STEP_MEMORY, evidence.phase, evidence.over_memory)
    said = _said(evidence)
    if any(rank_exit.code < 0 or rank_exit.rank not in said for rank_exit in evidence.exits_of_their_own):
        return _from_exit(evidence)
    if evidence.disk_full and evidence.ended_by == "itself":
        return diagnose_as(classes.DISK_FULL, evidence.phase, evidence.disk_full)
    if consequence is not None:
        return _from_exception(consequence)
    if evidence.ended_by != "itself" and not evidence.phases:
        return diagnose_as(classes.LAUNCH, "init", f"no rank began within {evidence.limit_seconds:g} s")
    if evidence.ended_by == "deadline":
        return diagnose_as(classes.TIMEOUT, evidence.phase, f"not finished after {evidence.limit_seconds:g} s")
    if evidence.ended_by == "hang":
        return diagnose_as(classes.HANG, evidence.phase, f"no sign of life for {evidence.limit_seconds:g} s")
    return _from_exit(evidence)


def _from_exception(exception: RankException) -> Diagnosis:
    row = classify(exception.type, exception.message, exception.phase)
    message = f"{exception.type}: {exception.message}"
    if row is None:
        outcome: OutcomeName = "CAPTURE_FAILED" if exception.phase == "capture" else "FAILED"
        return Diagnosis(outcome, exception.phase, exception.rank, exception.type, message, "see the rank's log")
    return diagnose_as(row, exception.phase, message, exception.rank)


def _from_exit(evidence: Evidence) -> Diagnosis:
    """From exit codes alone, of the rank that is most likely the cause; the earliest of equals."""
    said = _said(evidence)
    first = min(evidence.exits_of_their_own, key=lambda rank_exit: _consequence(rank_exit, said), default=None)
    rank, code = (first.rank, first.code) if first else (None, evidence.exit_code)
    phase = evidence.phases.get(rank or 0, "init")
    if code == -signal.SIGKILL and first is not None and first.oom_killed:
        return diagnose_as(classes.KERNEL_OOM, phase, "the kernel ended it for want of host memory", rank)
    if code >= 0 and evidence.disk_full:
        return diagnose_as(classes.DISK_FULL, phase, evidence.disk_full, rank)
    if code >= 0 and first is None and not evidence.phases:
        return diagnose_as(classes.LAUNCH, phase, f"{_exit_words(code)} before any rank began")
    if code >= 0:
        return diagnose_as(classes.EXIT, phase, f"{_exit_words(code)}, and no rank recorded an exception", rank)
    name = _signal_name(code)
    row = next(row for row in classes.SIGNALS if row.name in (name, "SIGNAL"))
    message = f"{_exit_words(code)}, which the supervisor did not send"
    return Diagnosis(row.outcome, phase, rank, name, message, row.remedy)


def _said(evidence: Evidence) -> Set[int]:
    return {exception.rank for exception in evidence.exceptions}


def _consequence(rank_exit: RankExit, said: Set[int]) -> int:
    """How likely an exit is a consequence of another rank's: torchrun ends those that are left by SIGTERM, and who said
    something has said that another had gone."""
    if rank_exit.code == -signal.SIGTERM:
        return 2
    if rank_exit.code >= 0:
        return 3 if rank_exit.rank in said else 1
    return 0


def _exit_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by {_signal_name(code)}"


def _signal_name(code: int) -> str:
    """Real-time signals have numbers, but all between the first and the last have no name."""
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
