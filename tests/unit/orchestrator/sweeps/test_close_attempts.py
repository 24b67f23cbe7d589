"""Test outcomes that no supervisor wrote: of attempts that ended with their job, and of runs that no job will start any
more."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.common.atomic_files import JsonLines, read_json, write_json
from launch.contract.outcomes import Outcome, OutcomeName, outcome_to_json, read_outcome
from launch.contract.paths import SweepPaths
from launch.failures.diagnose import Evidence, RankException
from launch.failures.evidence import read_evidence
from launch.failures.job_outcome import never_started
from orchestrator.errors import SystemFault
from orchestrator.slurm.job_listing import Job
from orchestrator.sweeps.bundle_owner import BundleOwner
from orchestrator.sweeps.close_attempts import MOST_LAUNCHES, close_dead_attempts
from orchestrator.sweeps.run_state import RunState, StateName

RUN = "eager-1a2b3c4d5e-r0"


def job(state: str, nodes: str = "node2") -> Job:
    return Job("12_3", "token", state, nodes=nodes)


def test_what_an_attempt_left_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    sweep = SweepPaths(tmp_path)
    bundle, attempt = sweep.bundle("bundle"), sweep.run(RUN).attempt(1)
    assert read_evidence(attempt, "job") == Evidence("job", 0, {}, ())
    assert BundleOwner(bundle, False).allocation == ""
    with JsonLines(bundle.allocations) as lines:
        lines.write({"allocation": 1})
        lines.write({"allocation": 2})
    with JsonLines(attempt.events(1)) as lines:
        lines.write({"time": 1.0, "kind": "enter", "phase": "build", "step": None})
        lines.write({"time": 2.0, "kind": "exception", "phase": "build", "step": None, "type": "E", "message": "m"})
    with open(attempt.events(1), "a") as torn:
        torn.write('{"time": 3')
    expected = Evidence("job", 0, {1: "build"}, (RankException(1, 2.0, "build", "E", "m"),))
    assert read_evidence(attempt, "job") == expected
    assert BundleOwner(bundle, False).allocation == "bundle.2"


@pytest.fixture
def sweep(tmp_path: Path) -> SweepPaths:
    return SweepPaths(tmp_path / "sweep")


def outcome(name: OutcomeName, failure_class: str = "") -> Outcome:
    return Outcome(name, "measure", "bundle.1", 1.0, 2.0, failure_class=failure_class)


def ended(name: OutcomeName = "TIMEOUT") -> RunState:
    return RunState(RUN, name, 2, outcome=outcome(name), recorded=False, job=job("TIMEOUT"))


def abandoned(name: StateName = "PLANNED", launches: int = MOST_LAUNCHES, job_state: str = "FAILED") -> RunState:
    return RunState(RUN, name, 1, job=job(job_state), abandoned=True, launches=launches)


def test_an_outcome_that_nobody_wrote_is_written_once(sweep: SweepPaths) -> None:
    attempt = sweep.run(RUN).attempt(1)
    attempt.logs.mkdir(parents=True)
    assert close_dead_attempts(sweep, {RUN: ended()})
    assert read_outcome(attempt) == outcome("TIMEOUT")
    assert close_dead_attempts(sweep, {RUN: ended("NODE_FAIL")}), (
        "there was something to write, as far as this command knew"
    )
    assert read_json(attempt.outcome)["outcome"] == "TIMEOUT"
    assert sorted(path.name for path in attempt.root.iterdir()) == ["logs", "outcome.json"], "nothing is left beside it"


def test_an_outcome_that_the_supervisor_wrote_meanwhile_stays(sweep: SweepPaths) -> None:
    attempt = sweep.run(RUN).attempt(1)
    write_json(attempt.outcome, outcome_to_json(attempt, outcome("COMPLETED")))
    close_dead_attempts(sweep, {RUN: ended()})
    assert read_json(attempt.outcome)["outcome"] == "COMPLETED"


def test_nothing_is_written_of_what_lives_or_is_on_disk(sweep: SweepPaths) -> None:
    states = [
        RunState(RUN, "RUNNING", 2, alive=True, job=job("RUNNING")),
        RunState(RUN, "QUEUED", 1, alive=True, job=job("PENDING")),
        RunState(RUN, "TIMEOUT", 2, outcome=outcome("TIMEOUT"), job=job("TIMEOUT")),
        RunState(RUN, "PLANNED", 1),
        RunState(RUN, "INTERRUPTED", 2, job=job("TIMEOUT")),
        abandoned(launches=MOST_LAUNCHES - 1),
    ]
    assert [close_dead_attempts(sweep, {RUN: state}) for state in states] == [False] * len(states)
    assert not sweep.root.exists()


def test_a_run_that_no_job_begins_is_given_up_and_says_why(sweep: SweepPaths) -> None:
    assert close_dead_attempts(sweep, {RUN: abandoned()})
    written = read_outcome(sweep.run(RUN).attempt(1))
    assert written and (written.outcome, written.failure_class, written.phase) == ("ENVIRONMENT", "LAUNCH", "init")
    assert written.message == "3 jobs in a row ended before any run began; the last, 12_3, as FAILED"
    assert never_started(written) and not never_started(outcome("ENVIRONMENT", "LAUNCH"))


def test_it_is_given_up_after_a_failure_of_the_infrastructure_and_no_result_is_hidden(sweep: SweepPaths) -> None:
    for name, given_up in (("NODE_FAIL", True), ("NUMERIC", False), ("COMPLETED", False)):
        before = dataclasses.replace(abandoned(), name=name, next_attempt=2, outcome=outcome(name))  # type: ignore[arg-type]
        assert close_dead_attempts(sweep, {RUN: before}) == given_up
        assert sweep.run(RUN).attempt(2).outcome.exists() == given_up
        sweep.run(RUN).attempt(2).outcome.unlink(missing_ok=True)


def test_an_attempt_that_begins_meanwhile_is_not_given_up(sweep: SweepPaths) -> None:
    attempt = sweep.run(RUN).attempt(1)
    attempt.logs.mkdir(parents=True)
    close_dead_attempts(sweep, {RUN: abandoned()})
    assert not attempt.outcome.exists()


def test_a_run_whose_job_waited_for_too_long_says_so(sweep: SweepPaths) -> None:
    state = abandoned("CANCELLED", launches=1, job_state="CANCELLED")
    assert close_dead_attempts(sweep, {RUN: state}, {"12_3": "it waited for more than 60 minutes (Resources)"})
    written = read_json(sweep.run(RUN).attempt(1).outcome)
    assert written["outcome"] == written["failure_class"] == "CANCELLED"
    assert written["message"] == "job 12_3 was cancelled: it waited for more than 60 minutes (Resources)"


@pytest.mark.parametrize("state", [RunState(RUN, "CANCELLED", 1), abandoned("CANCELLED", job_state="CANCELLED")])
def test_the_report_learns_that_a_run_was_cancelled_before_it_began(sweep: SweepPaths, state: RunState) -> None:
    assert close_dead_attempts(sweep, {RUN: state})
    written = read_outcome(sweep.run(RUN).attempt(1))
    assert written and (written.outcome, written.message) == ("CANCELLED", "cancelled before it began")
    assert not close_dead_attempts(sweep, {RUN: dataclasses.replace(state, next_attempt=2)}), (
        "an attempt before it is cancelled"
    )


@pytest.mark.parametrize("state", [ended, abandoned])
def test_a_store_that_cannot_be_written_is_one_message(tmp_path: Path, state: Callable[[], RunState]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemFault, match="cannot be written"):
        close_dead_attempts(SweepPaths(tmp_path / "file"), {RUN: state()})


def test_outcomes_are_dated_when_they_are_found_out(sweep: SweepPaths) -> None:
    """A report that was written before then is older than these outcomes."""
    close_dead_attempts(sweep, {RUN: abandoned()})
    assert read_json(sweep.run(RUN).attempt(1).outcome)["ended"] == pytest.approx(time.time(), abs=5)
