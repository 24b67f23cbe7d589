"""Watch the ranks of one attempt until they end or must be ended, and write the outcome."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from launch.common.atomic_files import FULL, write_json
from launch.contract.outcomes import Outcome, outcome_to_json
from launch.contract.paths import AttemptPaths
from launch.contract.plan import Limits
from launch.contract.spec import first_of_task
from launch.failures.diagnose import Diagnosis, EndedBy, Evidence, RankExit, diagnose
from launch.failures.evidence import read_evidence, read_last_words, record_bytes
from launch.failures.job_outcome import make_outcome
from launch.supervise.compilers import CompilerWatch

POLL_SECONDS = 0.1
SUSPENDED_SECONDS = 5.0
"""A longer gap between two polls means that the job was suspended (PreemptMode=SUSPEND), not that the host is busy."""

ROOM_SECONDS = 600.0
"""How long the supervisor waits for disk space to write an outcome. A run waits as long for slurmctld."""
ROOM_POLL_SECONDS = 1.0
STACKS_SECONDS = 1.0
"""How long ranks may take to print their stacks."""


class Ranks(Protocol):
    """Started ranks: on this host (launch/supervise/local_ranks.py), or in a Slurm step (launch/supervise/slurm_step.py)."""

    def poll(self) -> int | None:
        """Return the exit code of the first failed rank or of srun, or minus the signal's number; None while ranks run."""

    def exits(self) -> tuple[RankExit, ...]:
        """Return the failed ranks, the first failure first."""

    def print_stacks(self) -> None:
        """Make each rank write the stacks of its threads to its log."""

    def end(self) -> None:
        """End all ranks. No rank runs when this returns."""

    def ask_scheduler(self, evidence: Evidence) -> Evidence:
        """Return ``evidence`` with the scheduler's additional information."""

    def where(self, diagnosis: Diagnosis) -> str:
        """Return the failed node, or the node of the failed rank; "" if unknown."""


def run_attempt(
    attempt: AttemptPaths,
    ranks: Ranks,
    limits: Limits,
    allocation: str,
    end_request: Callable[[], EndedBy | None],
    *,
    is_command: bool = False,
    ranks_per_task: int = 1,
    before_outcome: Callable[[Outcome], None] = lambda _: None,
) -> None:
    """Wait for ``ranks`` and write the outcome. End them at a limit, or when ``end_request`` says who wants them to end.

    Call ``before_outcome`` when no rank runs any more, each time before this tries to write the outcome. If Slurm ends the job
    without a reason, write no outcome: the orchestrator writes it once it knows the reason.
    """
    started = time.time()
    ended_by = _watch(attempt, ranks, limits, end_request)
    # Collect evidence before ranks are ended below, because that is not the cause of the failure.
    exits = ranks.exits()
    evidence = ranks.ask_scheduler(
        replace(
            read_evidence(attempt, ended_by),
            exit_code=ranks.poll() or 0,
            exits=exits,
            is_command=is_command,
            last_words={rank: read_last_words(attempt.log(rank)) for rank in [end.rank for end in exits] or [0]},
            ranks_per_task=ranks_per_task,
            limit_seconds=limits.hang_seconds if ended_by == "hang" else limits.run_seconds,
        )
    )

    def outcome(seen: Evidence) -> Outcome:
        diagnosis = diagnose(seen)
        node = ranks.where(diagnosis)
        code = _exit_code(diagnosis.rank, seen, ranks)
        return make_outcome(diagnosis, allocation, started, time.time(), node, code)

    if evidence.ended_by == "job" and evidence.job_state:
        # Write at once, because Slurm leaves only seconds.
        write_json(attempt.outcome, outcome_to_json(attempt, outcome(evidence)))
    if evidence.ended_by == "hang":
        ranks.print_stacks()
    ranks.end()
    if evidence.ended_by != "job":
        _write_when_disk_has_space(attempt, outcome, evidence, end_request, before_outcome)


def _exit_code(blamed: int | None, evidence: Evidence, ranks: Ranks) -> int | None:
    """Return how the process of the ``blamed`` rank ended, None if unknown. If none is blamed, it is that of all ranks."""
    if blamed is None:
        return ranks.poll()
    first = first_of_task(blamed, evidence.ranks_per_task)
    return next((end.code for end in (*evidence.exits, *ranks.exits()) if end.rank == first), None)


def _write_when_disk_has_space(
    attempt: AttemptPaths,
    outcome: Callable[[Evidence], Outcome],
    evidence: Evidence,
    end_request: Callable[[], EndedBy | None],
    before_outcome: Callable[[Outcome], None],
) -> None:
    """Write the outcome. If the disk is full, wait for space, so that the rest of the bundle can still run.

    Raises:
        OSError: the disk is still full after ten minutes, or when the supervisor is asked to end.
    """
    deadline, ended = time.monotonic() + ROOM_SECONDS, time.time()
    while True:
        try:
            made = replace(outcome(evidence), ended=ended)
            before_outcome(made)
            write_json(attempt.outcome, outcome_to_json(attempt, made))
            return
        except OSError as error:
            if error.errno not in FULL or end_request() is not None or time.monotonic() > deadline:
                raise
            evidence = replace(evidence, disk_full=f"its records could not be written: {error.strerror}")
        time.sleep(ROOM_POLL_SECONDS)


def _watch(attempt: AttemptPaths, ranks: Ranks, limits: Limits, end_request: Callable[[], EndedBy | None]) -> EndedBy:
    begun = last_sign = now = time.monotonic()
    compilers, size = CompilerWatch(os.getpid(), now), -1
    while ranks.poll() is None:
        time.sleep(POLL_SECONDS)
        before, now = now, time.monotonic()
        if now - before > SUSPENDED_SECONDS:
            # Ranks and this process were suspended, so the gap does not count towards any limit.
            begun, last_sign = begun + now - before, now
        if (grown := record_bytes(attempt)) != size:
            size, last_sign = grown, now
        if not attempt.metrics.exists() and compilers.are_busy(now):
            last_sign = now
        if (ended_by := end_request()) is not None:
            return ended_by
        if now - begun > limits.run_seconds:
            return "deadline"
        if now - last_sign > limits.hang_seconds:
            return "hang"
    return "itself"
