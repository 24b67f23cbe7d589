"""How attempts ended whose job has ended and that nobody left an outcome of: Slurm took the supervisor along, too, or
never began it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from launch.common.atomic_files import RecordError, read_json_lines, write_json
from launch.common.redact import redact
from launch.contract.outcomes import Outcome
from launch.contract.paths import AttemptPaths, BundlePaths, SweepPaths
from launch.contract.records.events import Phase
from launch.failures.classes import CANCELLED, LAUNCH, FailureClass
from launch.failures.diagnose import Evidence, RankException, blames_infrastructure, diagnose, is_infrastructure
from launch.failures.evidence import events_of, exceptions_of, phases_of
from orchestrator.slurm.job_listing import Job
from orchestrator.sweeps.store import report_disk_errors

if TYPE_CHECKING:
    from orchestrator.sweeps.run_state import RunState

MOST_LAUNCHES = 3
"""How often in a row a bundle is handed to Slurm without an attempt being begun, before that is how they end."""


@dataclass(frozen=True)
class AttemptRemains:
    """What an attempt has left on disk, short of an outcome."""

    allocation: str
    begun: float
    """In seconds since the epoch."""
    phases: Mapping[int, Phase]
    exceptions: tuple[RankException, ...]


def read_remains(bundle: BundlePaths, attempt: AttemptPaths, begun: float) -> AttemptRemains:
    events = events_of(attempt)
    return AttemptRemains(_last_allocation(bundle), begun, phases_of(events), exceptions_of(events))


def outcome_of_job(job: Job, remains: AttemptRemains, now: float) -> Outcome:
    """The outcome of an attempt whose job has ended: what ranks said, where that explains it, else how the job ended."""
    evidence = Evidence("job", 0, remains.phases, remains.exceptions, job_state=job.state)
    found = diagnose(evidence)
    # Of several nodes nobody says which failed; Slurm gives none that is down.
    node = job.nodes if found.outcome == "NODE_FAIL" and not set(job.nodes) & set("[,") else ""
    return Outcome(
        found.outcome, found.phase, remains.allocation, remains.begun, now, found.rank, found.failure_class,
        redact(found.message), found.remedy, node=node,
        infrastructure=blames_infrastructure(found.outcome, found.failure_class),
    )  # fmt: skip


def close_dead_attempts(
    sweep: SweepPaths, states: Mapping[str, RunState], called_off: Mapping[str, str] = MappingProxyType({})
) -> bool:
    """Write the outcomes that ``states`` tells of and the disk does not, and those of runs that no job will begin any
    more. ``called_off`` is why jobs that waited were taken out of the queue, by id. The value is whether there were any.

    An outcome that is on disk, or gets there meanwhile, is kept, and so is an attempt that somebody begins.

    Raises:
        SystemFault: the store cannot be written to.
    """
    now = time.time()
    found = False
    for run_id, state in states.items():
        why = _given_up(state, called_off)
        if state.outcome is not None and not state.recorded:
            _write(sweep, sweep.run(run_id).attempt(state.next_attempt - 1), state.outcome)
        elif why is not None:
            _claim(sweep, sweep.run(run_id).attempt(state.next_attempt), _outcome_of_none(*why, now))
        else:
            continue
        found = True
    return found


def never_began(outcome: Outcome) -> bool:
    """Whether :func:`close_dead_attempts` gave the run up, since job after job began nothing of it. Another would not either."""
    return outcome.failure_class == LAUNCH.name and not outcome.allocation


def _given_up(state: RunState, called_off: Mapping[str, str]) -> tuple[FailureClass, str] | None:
    """Why the attempt that was ordered will not be begun any more; None where it may be, or another outcome stands."""
    if state.job is None or not state.abandoned or (state.outcome is not None and not is_infrastructure(state.outcome)):
        return None
    job = state.job
    if state.name == "CANCELLED" and job.job_id in called_off:
        return CANCELLED, f"job {job.job_id} was taken out of the queue: {called_off[job.job_id]}"
    if state.name != "CANCELLED" and state.launches >= MOST_LAUNCHES:
        message = f"{state.launches} jobs in a row ended before any run began; the last, {job.job_id}, as {job.state}"
        return LAUNCH, message
    return None


def _outcome_of_none(failure: FailureClass, message: str, now: float) -> Outcome:
    return Outcome(
        failure.outcome,
        "init",
        "",
        now,
        now,
        failure_class=failure.name,
        message=message,
        remedy=failure.remedy,
        infrastructure=failure.infrastructure,
    )


def _claim(sweep: SweepPaths, attempt: AttemptPaths, outcome: Outcome) -> None:
    with report_disk_errors(sweep), contextlib.suppress(FileExistsError):
        attempt.root.mkdir(parents=True)
        _write(sweep, attempt, outcome)


def _write(sweep: SweepPaths, attempt: AttemptPaths, outcome: Outcome) -> None:
    """Put ``outcome`` where none is: a link is made once or not at all."""
    beside = attempt.outcome.with_name(f".{attempt.outcome.name}.{os.getpid()}")
    with report_disk_errors(sweep), contextlib.suppress(FileExistsError):
        write_json(beside, asdict(outcome))
        try:
            os.link(beside, attempt.outcome)
        finally:
            beside.unlink()


def _last_allocation(bundle: BundlePaths) -> str:
    """The name of the latest supervision, as launch.supervise.supervisor spells it."""
    try:
        lines = list(read_json_lines(bundle.allocations))
        return f"{bundle.root.name}.{lines[-1]['allocation']}" if lines else ""
    except (RecordError, KeyError):
        return ""
