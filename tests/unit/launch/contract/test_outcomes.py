"""Test what each outcome implies."""

from __future__ import annotations

import pytest

from launch.contract.outcomes import (
    OUT_OF_MEMORY_IN_CHECK,
    OUTCOME_TABLE,
    OUTCOMES,
    RESULTS_INTACT,
    Outcome,
    OutcomeName,
)
from launch.failures.classes import FAILURE_CLASSES, FailureClass


def ended(name: OutcomeName, failure_class: str = "", *, infrastructure: bool = False) -> Outcome:
    return Outcome(name, "measure", "b.1", 0.0, 1.0, failure_class=failure_class, infrastructure=infrastructure)


def test_every_outcome_has_one_row() -> None:
    assert tuple(OUTCOME_TABLE) == OUTCOMES
    assert RESULTS_INTACT == ("COMPLETED", "TEARDOWN_HANG")


@pytest.mark.parametrize("name", OUTCOMES)
def test_what_an_outcome_implies(name: OutcomeName) -> None:
    outcome = ended(name)
    assert outcome.results_intact == (name in ("COMPLETED", "TEARDOWN_HANG"))
    assert outcome.is_infrastructure == (name in ("NODE_FAIL", "PREEMPTED"))
    assert outcome.is_informative == (name not in ("NODE_FAIL", "PREEMPTED", "CANCELLED"))
    assert outcome.is_own_failure == (name in ("NUMERIC", "CAPTURE_FAILED", "CUDA_OOM", "HANG", "FAILED"))
    assert (outcome.row.cause == "setup") == (name in ("CONFIG", "ENVIRONMENT"))
    assert outcome.blames_node == (name == "NODE_FAIL")


@pytest.mark.parametrize("row", [row for row in FAILURE_CLASSES if row.infrastructure], ids=lambda row: row.name)
def test_a_failure_of_the_infrastructure_is_no_evidence_of_the_run(row: FailureClass) -> None:
    outcome = ended(row.outcome, row.name, infrastructure=True)
    assert outcome.is_infrastructure and not outcome.is_informative and not outcome.is_own_failure
    assert outcome.blames_node == (row.name not in ("PREEMPTED", "REQUEUED", "DISK_FULL", "JOB_GONE"))


@pytest.mark.parametrize("name", ["SUPERVISOR", "SIGKILL"])
def test_what_somebody_else_may_have_ended_is_not_held_against_the_run(name: str) -> None:
    assert name in {row.name for row in FAILURE_CLASSES}
    assert ended("FAILED", name).is_informative and not ended("FAILED", name).is_own_failure


def test_memory_that_only_a_step_check_lacked_is_not_held_against_the_run() -> None:
    assert OUT_OF_MEMORY_IN_CHECK in {row.name for row in FAILURE_CLASSES}
    outcome = ended("CUDA_OOM", OUT_OF_MEMORY_IN_CHECK)
    assert not outcome.is_informative and not outcome.is_own_failure and not outcome.is_infrastructure
