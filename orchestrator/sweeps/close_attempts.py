"""Write the outcomes of attempts whose job ended without one, and of runs that no job will start any more."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from types import MappingProxyType

from launch.common.atomic_files import write_json
from launch.contract.outcomes import Outcome, outcome_to_json
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.failures.classes import CANCELLED, LAUNCH, FailureClass
from launch.failures.job_outcome import unstarted_outcome
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.store import report_disk_errors

MOST_LAUNCHES = 3
"""How often a bundle is submitted to Slurm in a row without starting an attempt. Then its runs end as LAUNCH."""


def close_dead_attempts(
    sweep: SweepPaths, states: Mapping[str, RunState], called_off: Mapping[str, str] = MappingProxyType({})
) -> bool:
    """Write the outcomes in ``states`` that are not on disk, and outcomes of runs that no job will start any more.

    ``called_off`` has the reason why waiting jobs were cancelled, by job id. Return whether there was anything to write.
    Outcomes and attempts that appear on disk meanwhile are kept.

    Raises:
        SystemFault: the store cannot be written to.
    """
    now = time.time()
    found = False
    for run_id, state in states.items():
        reason = _reason_to_give_up(state, called_off)
        if state.outcome is not None and not state.recorded:
            _write(sweep, sweep.run(run_id).attempt(state.next_attempt - 1), state.outcome)
        elif reason is not None:
            _claim(sweep, sweep.run(run_id).attempt(state.next_attempt), unstarted_outcome(*reason, now))
        else:
            continue
        found = True
    return found


def _reason_to_give_up(state: RunState, called_off: Mapping[str, str]) -> tuple[FailureClass, str] | None:
    """Return why no job will start the ordered attempt any more, or None if one may or the run has a result."""
    job = state.job
    if job is not None and state.abandoned and not state.ended_by_itself:
        if state.name == "CANCELLED" and job.job_id in called_off:
            return CANCELLED, f"job {job.job_id} was cancelled: {called_off[job.job_id]}"
        if state.name != "CANCELLED" and state.launches >= MOST_LAUNCHES:
            message = (
                f"{state.launches} jobs in a row ended before any run began; the last, {job.job_id}, as {job.state}"
            )
            return LAUNCH, message
    if state.name == "CANCELLED" and state.next_attempt == 1:
        # The report reads only records.
        return CANCELLED, "cancelled before it began"
    return None


def _claim(sweep: SweepPaths, attempt: AttemptPaths, outcome: Outcome) -> None:
    with report_disk_errors(sweep), contextlib.suppress(FileExistsError):
        attempt.root.mkdir(parents=True)
        _write(sweep, attempt, outcome)


def _write(sweep: SweepPaths, attempt: AttemptPaths, outcome: Outcome) -> None:
    """Write ``outcome`` unless there is one. It is linked into place, because a link never replaces a file."""
    temporary = attempt.outcome.with_name(f".{attempt.outcome.name}.{os.getpid()}")
    with report_disk_errors(sweep), contextlib.suppress(FileExistsError):
        write_json(temporary, outcome_to_json(attempt, outcome))
        try:
            os.link(temporary, attempt.outcome)
        finally:
            temporary.unlink()
