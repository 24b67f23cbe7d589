"""One attempt's ranks, watched until they end or have to be ended, and what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Protocol

from launch.common.atomic_files import FULL, write_json
from launch.contract.outcomes import Outcome
from launch.contract.paths import AttemptPaths
from launch.contract.plan import Limits
from launch.failures.diagnose import Diagnosis, EndedBy, Evidence, RankExit, diagnose
from launch.failures.evidence import read_evidence, record_bytes
from launch.failures.job_outcome import make_outcome

POLL_SECONDS = 0.1
SUSPENDED_SECONDS = 5.0
"""Between two looks: a job that was suspended, as under PreemptMode=SUSPEND, and not a busy host."""

ROOM_SECONDS = 600.0
"""How long an outcome waits for room on the disk: as long as a run waits for slurmctld."""
ROOM_POLL_SECONDS = 1.0


class Ranks(Protocol):
    """Ranks that have been started: on this host (launch/supervise/local_ranks.py), or as a step of a Slurm job
    (launch/supervise/slurm_step.py)."""

    def poll(self) -> int | None:
        """The exit code of what started them, or minus a signal; None while they run."""

    def exits(self) -> tuple[RankExit, ...]:
        """Ranks that failed, the first one first."""

    def print_stacks(self) -> None:
        """Have each rank write the stacks of its threads to its log."""

    def end(self) -> None:
        """End what ranks there are; none is left when this returns."""

    def ask_scheduler(self, evidence: Evidence) -> Evidence:
        """``evidence`` with what the scheduler knows beyond it."""

    def where(self, diagnosis: Diagnosis) -> str:
        """The node that failed, or on which the rank that failed ran; "" where that is not known."""


def run_attempt(
    attempt: AttemptPaths,
    ranks: Ranks,
    limits: Limits,
    allocation: str,
    asked: Callable[[], EndedBy | None],
) -> None:
    """Wait for ``ranks``, or end them when the time, their silence or ``asked`` says so, and write the outcome.

    None is written where Slurm ends the job and does not say why: the orchestrator will, once it knows.
    """
    started = time.time()
    ended_by = _watch(attempt, ranks, limits, asked)
    # Before anything is ended here: what becomes of ranks after that is no cause.
    evidence = ranks.ask_scheduler(
        replace(
            read_evidence(attempt, ended_by),
            exit_code=ranks.poll() or 0,
            exits=ranks.exits(),
            limit_seconds=limits.hang_seconds if ended_by == "hang" else limits.run_seconds,
        )
    )

    def outcome(seen: Evidence) -> Outcome:
        diagnosis = diagnose(seen)
        node = ranks.where(diagnosis)
        return make_outcome(diagnosis, allocation, started, time.time(), node, ranks.poll())

    if evidence.ended_by == "job" and evidence.job_state:
        write_json(attempt.outcome, asdict(outcome(evidence)))  # at once: seconds are left
    if evidence.ended_by == "hang":
        ranks.print_stacks()
    ranks.end()
    if evidence.ended_by != "job":
        _write_once_there_is_room(attempt, outcome, evidence, asked)


def _write_once_there_is_room(
    attempt: AttemptPaths,
    outcome: Callable[[Evidence], Outcome],
    evidence: Evidence,
    asked: Callable[[], EndedBy | None],
) -> None:
    """A full disk ends the ranks, which can no longer say so, and is not to take the rest of the bundle along.

    Raises:
        OSError: there is no room after ten minutes, or when the supervisor is asked to end.
    """
    deadline, ended = time.monotonic() + ROOM_SECONDS, time.time()
    while True:
        try:
            write_json(attempt.outcome, asdict(replace(outcome(evidence), ended=ended)))
            return
        except OSError as error:
            if error.errno not in FULL or asked() is not None or time.monotonic() > deadline:
                raise
            evidence = replace(evidence, disk_full=f"its records could not be written: {error.strerror}")
        time.sleep(ROOM_POLL_SECONDS)


def _watch(attempt: AttemptPaths, ranks: Ranks, limits: Limits, asked: Callable[[], EndedBy | None]) -> EndedBy:
    begun = last_sign = now = time.monotonic()
    size = -1
    while ranks.poll() is None:
        time.sleep(POLL_SECONDS)
        before, now = now, time.monotonic()
        if now - before > SUSPENDED_SECONDS:
            # Nobody ran, this process included: the time counts for no limit, and ranks begin again to be waited for.
            begun, last_sign = begun + now - before, now
        if (grown := record_bytes(attempt)) != size:
            size, last_sign = grown, now
        if (asked_by := asked()) is not None:
            return asked_by
        if now - begun > limits.run_seconds:
            return "deadline"
        if now - last_sign > limits.hang_seconds:
            return "hang"
    return "itself"
