"""Diagnose an attempt that has ended from its evidence: outcome, class, phase, first failed rank and fix. Pure.

The first exception in time is the cause. Later exceptions of other ranks (a closed connection, a cancelled collective) are
consequences and are ignored.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from launch.contract.outcomes import OutcomeName
from launch.contract.records.events import Phase
from launch.contract.spec import first_of_task
from launch.failures import classes
from launch.failures.classes import CLASS_OF_JOB_STATE, FailureClass, classify, is_consequence
from launch.failures.printed_errors import LastWords

EndedBy = Literal["itself", "cancel", "deadline", "hang", "job"]
"""Who ended an attempt. "job" means Slurm, which ends the whole job."""


@dataclass(frozen=True)
class RankException:
    """An exception as a rank recorded it. ``time`` is in seconds since the epoch."""

    rank: int
    time: float
    phase: Phase
    type: str
    message: str

    @property
    def text(self) -> str:
        return f"{self.type}: {self.message}"

    @property
    def row(self) -> FailureClass | None:
        return classify(self.type, self.message, self.phase)


@dataclass(frozen=True)
class RankExit:
    """How a rank's process ended: an exit code, or minus the signal that ended it."""

    rank: int
    """The rank, or the first of them if the process started several."""
    code: int
    time: float | None = None
    """In seconds since the epoch, or None if it was not recorded."""
    node: str = ""
    oom_killed: bool = False
    """Whether the kernel killed a process for memory in the rank's control group while the rank ran."""
    is_recorded: bool = True
    """Whether this end was recorded. If not, the rank is gone, and with it the process that records its end."""


@dataclass(frozen=True)
class Evidence:
    """All evidence of an attempt that has ended, up to the moment when the supervisor began to end its ranks."""

    ended_by: EndedBy
    exit_code: int
    """The exit code of the process that started the ranks; 0 if it still ran."""
    phases: Mapping[int, Phase]
    """The last phase that each rank entered."""
    exceptions: tuple[RankException, ...] = ()
    exits: tuple[RankExit, ...] = ()
    """The failed ranks, the first failure first."""
    limit_seconds: float = 0.0
    job_state: str = ""
    """The state of the attempt's job if it has ended."""
    over_memory: str = ""
    """The memory of the attempt's step, in words, if Slurm ended the step because of it."""
    is_command: bool = False
    """Whether the ranks run the user's own program, which leaves no record before its first step."""
    last_words: Mapping[int, LastWords] = field(default_factory=dict)
    """What the failed ranks printed last, by the ranks of ``exits``. If there are none, that of rank 0."""
    ranks_per_task: int = 1
    """The number of ranks that each process in ``exits`` started."""
    disk_full: str = ""
    """Why the supervisor could not write the outcome, in words. Ranks could then not write either."""

    @property
    def phase(self) -> Phase:
        return self.phases.get(0, "init")

    @property
    def results_intact(self) -> bool:
        """Whether every step is on disk. Rank 0 writes metrics, and enters the teardown after the last of them."""
        return self.phase == "teardown"

    @property
    def ranks_with_exceptions(self) -> Set[int]:
        """The ranks whose exits are explained by exceptions, because all ranks of the process have recorded one."""
        found = {exception.rank for exception in self.exceptions}
        silent = {rank for first in found for rank in self.ranks_beside(first)} - found
        return found - {beside for rank in silent for beside in self.ranks_beside(rank)}

    def ranks_beside(self, rank: int) -> range:
        """Return all ranks of the process that started ``rank``."""
        first = first_of_task(rank, self.ranks_per_task)
        return range(first, first + self.ranks_per_task)

    @property
    def ranks_of_consequences(self) -> Set[int]:
        """The ranks that only report that another rank is gone, by their exceptions or by what they printed last."""
        return self.ranks_with_exceptions | {rank for rank, words in self.last_words.items() if words.is_consequence}

    @property
    def own_exits(self) -> tuple[RankExit, ...]:
        """The exits without those that another rank's failure caused (a later SIGTERM, by srun --kill-on-bad-exit).

        An end that was not recorded counts only if neither a full disk nor the rank's own exception explains it.
        """
        first = min((e.time for e in self.exits if e.time is not None), default=0.0)
        own = (e for e in self.exits if e.code != -signal.SIGTERM or e.time is None or e.time <= first)
        return tuple(e for e in own if e.is_recorded or not (self.disk_full or e.rank in self.ranks_with_exceptions))


@dataclass(frozen=True)
class Diagnosis:
    """The part of an outcome that follows from the evidence."""

    outcome: OutcomeName
    phase: Phase
    rank: int | None = None
    failure_class: str = ""
    message: str = ""
    remedy: str = ""
    infrastructure: bool = False
    repeats_alike: bool = False


_JOB_MESSAGES = {
    "CANCELLED": "its job was cancelled",
    "REQUEUED": "Slurm put its job back into the queue and started it again",
    "GONE": "its job left the queue, and neither squeue nor sacct knows how it ended",
}


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return how and why an attempt ended."""
    if evidence.results_intact:
        return _after_results(evidence)
    if evidence.ended_by == "cancel":
        return diagnose_as(classes.CANCELLED, evidence.phase, "cancelled while it ran")
    exception = first_exception(evidence.exceptions)
    if exception is not None and evidence.exit_code > 0 and _is_missing_steps(exception):
        # The observer misses steps because the program ended itself with an error before them.
        return _from_exit(evidence)
    if exception is not None and not _is_consequence(exception, evidence):
        return _from_exception(exception, evidence.last_words.get(exception.rank))
    if evidence.ended_by == "job":
        return diagnose_job_end(evidence.job_state, evidence.phase)
    return _without_cause(evidence, exception)


def is_explained(evidence: Evidence) -> bool:
    """Return whether the attempt's own records explain its end. If not, Slurm may have ended it."""
    if evidence.ended_by == "job":
        return False
    exception = first_exception(evidence.exceptions)
    completed = evidence.results_intact and evidence.exit_code == 0
    return evidence.ended_by != "itself" or completed or (exception is not None and not _is_communication(exception))


def without_spec(error: Exception) -> Diagnosis:
    """Diagnose an attempt that was not started because its spec cannot be read."""
    return diagnose_as(classes.SPEC, "init", f"spec.json cannot be read: {type(error).__name__}: {error}")


def diagnose_job_end(state: str, phase: Phase) -> Diagnosis:
    """Diagnose an attempt in ``phase`` whose job ended in ``state``, if nothing else ended the attempt.

    ``state`` is one of Slurm's (launch/slurm/job_states.py), "REQUEUED" for a job that was put back into the queue, or "GONE"
    for a job that squeue and sacct do not know any more.

    Raises:
        ValueError: a job in ``state`` has not ended.
    """
    if state not in CLASS_OF_JOB_STATE:
        raise ValueError(f"a job in state {state!r} has not ended")
    if phase == "teardown":
        return Diagnosis("COMPLETED", phase, message=f"its job ended ({state}) in its teardown, after its last result")
    return diagnose_as(CLASS_OF_JOB_STATE[state], phase, _JOB_MESSAGES.get(state, f"its job ended as {state}"))


def diagnose_as(failure: FailureClass, phase: Phase, message: str, rank: int | None = None) -> Diagnosis:
    """Return the diagnosis for one row of the table of failures."""
    of_class = (failure.infrastructure, failure.repeats_alike)
    return Diagnosis(failure.outcome, phase, rank, failure.name, message, failure.fix, *of_class)


def first_exception(exceptions: tuple[RankException, ...]) -> RankException | None:
    """Return the earliest exception that no other rank's failure caused, or the earliest of all if there is none."""
    ordered = sorted(exceptions, key=lambda exception: (exception.time, exception.rank))
    primary = [exception for exception in ordered if not _is_secondary(exception)]
    return next(iter(primary or ordered), None)


def _is_secondary(exception: RankException) -> bool:
    """Return whether the exception is about a missing rank. It is then a cause only if nothing else is known."""
    return is_consequence(exception.type, exception.message, exception.phase)


def _is_missing_steps(exception: RankException) -> bool:
    """Return whether the observer only says that steps are missing."""
    names = ("ENDED_EARLY", "OBSERVED", "NOT_SHOWN") if exception.phase == "init" else ("ENDED_EARLY",)
    return any(_is_class(exception, name) for name in names)


def _is_communication(exception: RankException) -> bool:
    return _is_secondary(exception) or _is_class(exception, "COMMUNICATION")


def _is_class(exception: RankException, name: str) -> bool:
    return exception.row is not None and exception.row.name == name


def _is_consequence(exception: RankException, evidence: Evidence) -> bool:
    # If Slurm ended the job, ranks may raise any communication error, because other nodes ended before theirs.
    return _is_communication(exception) if evidence.ended_by == "job" else _is_secondary(exception)


def _after_results(evidence: Evidence) -> Diagnosis:
    if evidence.ended_by == "cancel":
        return Diagnosis("COMPLETED", "teardown", message="cancelled in its teardown, after its last result")
    if evidence.ended_by == "job":
        return diagnose_job_end(evidence.job_state, "teardown")
    if evidence.ended_by != "itself":
        return diagnose_as(classes.TEARDOWN_HANG, "teardown", "results are on disk, but the processes did not end")
    exception, first = first_exception(evidence.exceptions), next(iter(evidence.exits), None)
    if exception is not None:
        return diagnose_as(classes.TEARDOWN_CRASH, "teardown", exception.text, exception.rank)
    if evidence.exit_code == 0:
        return Diagnosis("COMPLETED", "teardown")
    code, rank = (first.code, first.rank) if first else (evidence.exit_code, None)
    return diagnose_as(classes.TEARDOWN_CRASH, "teardown", f"{_exit_words(code)} after the results were on disk", rank)


def _without_cause(evidence: Evidence, consequence: RankException | None) -> Diagnosis:
    """Diagnose an attempt in which no rank recorded the cause. There may be a ``consequence`` of another rank's end."""
    if evidence.over_memory:
        return diagnose_as(classes.STEP_MEMORY, evidence.phase, evidence.over_memory)
    if any(
        rank_exit.code < 0 or rank_exit.rank not in evidence.ranks_with_exceptions for rank_exit in evidence.own_exits
    ):
        return _from_exit(evidence)
    if evidence.disk_full and evidence.ended_by == "itself":
        return diagnose_as(classes.DISK_FULL, evidence.phase, evidence.disk_full)
    if consequence is not None:
        return _from_exception(consequence)
    if evidence.ended_by != "itself" and not evidence.phases and not evidence.is_command:
        return diagnose_as(classes.LAUNCH, "init", f"no rank began within {evidence.limit_seconds:g} s")
    if evidence.ended_by == "deadline":
        return diagnose_as(classes.TIMEOUT, evidence.phase, f"not finished after {evidence.limit_seconds:g} s")
    if evidence.ended_by == "hang":
        words = evidence.last_words.get(0, LastWords()).text if evidence.phase in ("init", "build") else ""
        said = f" before the first step; rank 0 printed last: {words}" if words else ""
        return diagnose_as(classes.HANG, evidence.phase, f"no sign of life for {evidence.limit_seconds:g} s{said}")
    return _from_exit(evidence)


def _from_exception(exception: RankException, words: LastWords | None = None) -> Diagnosis:
    """Diagnose by an exception. A program that ended early without one, and with exit code 0, may have printed why in its ``words``."""
    if exception.row is not None:
        printed = words.text if words and words.kind and _is_class(exception, "ENDED_EARLY") else ""
        message = f"the last error in its log is {printed}; {exception.text}" if printed else exception.text
        return diagnose_as(exception.row, exception.phase, message, exception.rank)
    outcome: OutcomeName = "CAPTURE_FAILED" if exception.phase == "capture" else "FAILED"
    return Diagnosis(outcome, exception.phase, exception.rank, exception.type, exception.text, "see the rank's log")


def _from_exit(evidence: Evidence) -> Diagnosis:
    """Diagnose by the exit code of the rank that is most likely the cause, the earliest of several."""
    first = min(evidence.own_exits, key=lambda e: _unlikeliness(e, evidence.ranks_of_consequences), default=None)
    rank, code = (first.rank, first.code) if first else (None, evidence.exit_code)
    phase = evidence.phases.get(rank or 0, "init")
    words = evidence.last_words.get(rank or 0, LastWords())
    if code == -signal.SIGKILL and first is not None and first.oom_killed:
        return diagnose_as(classes.KERNEL_OOM, phase, "the kernel killed it because the host ran out of memory", rank)
    if code >= 0 and evidence.disk_full:
        return diagnose_as(classes.DISK_FULL, phase, evidence.disk_full, rank)
    if code >= 0 and evidence.is_command:
        return _from_last_words(words, evidence, phase, code, rank)
    if code >= 0 and first is None and not evidence.phases:
        return diagnose_as(classes.LAUNCH, phase, f"{_exit_words(code)} before any rank began")
    if code >= 0:
        said = f": {words.text}" if words.row(phase) else ""
        message = f"{_exit_words(code)}, and no rank recorded an exception{said}"
        return diagnose_as(words.row(phase) or classes.EXIT, phase, message, rank)
    if code == -signal.SIGABRT and (aborted := words.row(phase)) is not None:
        # NCCL's watchdog aborts the process of an error that Python never sees.
        return diagnose_as(aborted, phase, f"{_exit_words(code)}: {words.text}", rank)
    name = _signal_name(code)
    row = next(row for row in classes.SIGNALS if row.name in (name, "SIGNAL"))
    return Diagnosis(row.outcome, phase, rank, name, f"{_exit_words(code)}, which the supervisor did not send", row.fix)


def _from_last_words(words: LastWords, evidence: Evidence, phase: Phase, code: int, rank: int | None) -> Diagnosis:
    """Diagnose a user's program that recorded no exception by what it printed."""
    unseen = ", and no optimizer step of it was seen" if code == 0 else " before its first optimizer step"
    before = "" if {*evidence.phases.values()} - {"init"} else unseen
    of_signal = (row for row in classes.SIGNALS if row.name == words.kind)
    row = words.row(phase) or next(of_signal, classes.PROGRAM if before else classes.EXIT)
    said = f": {words.text}" if words.text else ""
    if rank is not None:
        # Torchrun has one exit code for all its ranks. The first of them to miss steps ended itself.
        first = first_exception(evidence.exceptions)
        missing = first.rank if first is not None and _is_missing_steps(first) else None
        beside = evidence.ranks_beside(rank)
        rank = next((named for named in (words.rank, missing) if named in beside), rank)
    return diagnose_as(row, phase, f"the program ended with {_exit_words(code)}{before}{said}", rank)


def _unlikeliness(rank_exit: RankExit, ranks_of_consequences: Set[int]) -> int:
    """Return how unlikely it is that the exit is the cause.

    srun ends the remaining ranks by SIGTERM. A rank whose exception did not count raised it because another rank was gone.
    """
    if rank_exit.code == -signal.SIGTERM:
        return 3
    if not rank_exit.is_recorded:
        return 2
    if rank_exit.code >= 0:
        return 4 if rank_exit.rank in ranks_of_consequences else 1
    return 0


def _exit_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by {_signal_name(code)}"


def _signal_name(code: int) -> str:
    # Real-time signals between the first and the last have no name.
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
