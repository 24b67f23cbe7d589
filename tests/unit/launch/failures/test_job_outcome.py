"""Test outcomes of attempts that ended with their job."""

from __future__ import annotations

import dataclasses

import pytest

from launch.contract.outcomes import Outcome
from launch.contract.records.events import Phase
from launch.failures.diagnose import Evidence, RankException
from launch.failures.job_outcome import outcome_of_job
from launch.slurm.job_states import ENDED


def remains(phase: Phase | None = "measure", *exceptions: RankException) -> Evidence:
    return Evidence("job", 0, {0: phase} if phase else {}, exceptions)


def job_outcome(state: str, evidence: Evidence, nodes: str = "node2") -> Outcome:
    return outcome_of_job(dataclasses.replace(evidence, job_state=state), nodes, "bundle.1", 100.0, 200.0)


CLASSES = {
    "BOOT_FAIL": "NODE_FAIL", "CANCELLED": "CANCELLED", "COMPLETED": "SUPERVISOR", "DEADLINE": "JOB_TIMEOUT",
    "FAILED": "SUPERVISOR", "GONE": "JOB_GONE", "LAUNCH_FAILED": "NODE_FAIL", "NODE_FAIL": "NODE_FAIL",
    "OUT_OF_MEMORY": "STEP_MEMORY", "PREEMPTED": "PREEMPTED", "RECONFIG_FAIL": "NODE_FAIL", "REVOKED": "CANCELLED",
    "TIMEOUT": "JOB_TIMEOUT",
}  # fmt: skip
OUTCOME_OF = {"SUPERVISOR": "FAILED", "JOB_GONE": "ENVIRONMENT", "JOB_TIMEOUT": "TIMEOUT", "STEP_MEMORY": "HOST_OOM"}


@pytest.mark.parametrize("state", sorted(ENDED))
def test_every_end_of_a_job_is_the_outcome_of_what_ran_in_it(state: str) -> None:
    outcome = job_outcome(state, remains())
    assert (outcome.outcome, outcome.failure_class) == (OUTCOME_OF.get(CLASSES[state], CLASSES[state]), CLASSES[state])
    assert (outcome.phase, outcome.allocation, outcome.started, outcome.ended) == ("measure", "bundle.1", 100.0, 200.0)
    assert outcome.message and outcome.remedy
    assert outcome.is_infrastructure == (outcome.outcome in ("NODE_FAIL", "PREEMPTED", "ENVIRONMENT"))


def test_an_attempt_that_recorded_nothing_ended_at_its_start() -> None:
    assert job_outcome("TIMEOUT", remains(None)).phase == "init"


def test_what_a_rank_said_goes_before_how_the_job_ended() -> None:
    said = RankException(3, 150.0, "capture", "OutOfMemoryError", "CUDA out of memory")
    outcome = job_outcome("NODE_FAIL", remains("capture", said))
    assert (outcome.outcome, outcome.rank, outcome.phase, outcome.node) == ("CUDA_OOM", 3, "capture", "")


def test_what_a_rank_said_of_others_does_not() -> None:
    """The ranks had gone with their node."""
    said = RankException(3, 150.0, "measure", "DistBackendError", "Connection closed by peer [10.0.0.7]:4242")
    assert job_outcome("NODE_FAIL", remains("measure", said)).outcome == "NODE_FAIL"


def test_results_that_are_on_disk_count() -> None:
    assert job_outcome("TIMEOUT", remains("teardown")).outcome == "COMPLETED"


@pytest.mark.parametrize(("state", "nodes", "node"), [
    ("NODE_FAIL", "node2", "node2"), ("NODE_FAIL", "node[2-3]", ""), ("NODE_FAIL", "node2,other7", ""),
    ("NODE_FAIL", "", ""), ("TIMEOUT", "node2", ""),
])  # fmt: skip
def test_the_node_that_failed_is_named_where_there_was_one(state: str, nodes: str, node: str) -> None:
    assert job_outcome(state, remains(), nodes).node == node


def test_no_secret_reaches_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_not_to_be_written")
    said = RankException(0, 150.0, "build", "ValueError", "hf_not_to_be_written is no token")
    assert "hf_not" not in job_outcome("FAILED", remains("build", said)).message
