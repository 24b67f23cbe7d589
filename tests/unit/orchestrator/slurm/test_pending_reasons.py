"""Test jobs that will not start by themselves: which ones these are, what the command says, and when one has waited too
long."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launch.contract.outcomes import Outcome
from orchestrator.output.jobs import blocked_jobs, describe_job, doubtful_jobs, slurm_faults
from orchestrator.slurm.job_listing import Job
from orchestrator.slurm.pending_reasons import PENDING_REASONS, blocking_reason
from orchestrator.sweeps.run_state import RunState, StateName
from orchestrator.sweeps.slurm_jobs import Jobs
from orchestrator.sweeps.submissions import Submission
from orchestrator.workflow.watch_slurm import PendingTimeout

NOW = 1_760_000_000.0
CANCELLED = Outcome("CANCELLED", "measure", "a", 1.0, 2.0)

HOPELESS = {
    "JobHeldUser": "its user holds it", "JobHeldAdmin": "an administrator holds it",
    "launch failed requeued held": "failed to launch", "launch_failed_requeued_held": "failed to launch",
    "JobHoldMaxRequeue": "failed to launch", "BadConstraints": "constraints",
    "DependencyNeverSatisfied": "can never be satisfied", "PartitionNodeLimit": "more nodes", "PartitionTimeLimit": "more time",
    "PartitionDown": "partition is down", "PartitionInactive": "starts no jobs", "PartitionConfig": "more nodes",
    "AccountNotAllowed": "account", "InvalidAccount": "account", "QOSNotAllowed": "QOS", "InvalidQOS": "QOS",
    "Job's account not permitted to use this partition (gpu allows a not b)": "its account",
    "Job's QOS not known, so it can't use this partition (gpu allows a)": "its QOS",
    "ReservationDeleted": "reservation", "DeadLine": "deadline",
    "AssocMaxCpuPerJobLimit": "allows per job", "AssocMaxGRESPerJob": "allows per job", "AssocMaxMemPerNode": "allows per job",
    "AssocMaxWallDurationPerJobLimit": "allows per job", "AssocMaxCpuMinutesPerJobLimit": "allows per job",
    "QOSMaxNodePerJobLimit": "allows per job", "QOSMaxWallDurationPerJobLimit": "allows per job", "QOSMinGRES": "allows per job",
    "MaxMemPerLimit": "allows per job", "QOSMaxCpuMinutesPerJobLimit": "allows per job", "QOSMaxGRESMinutesPerJob": "allows per job",
    "AssocGrpCPUMinutesLimit": "hours", "AssocGrpGRESMinutes": "hours", "QOSGrpWallLimit": "hours",
    "QOSUsageThreshold": "hours",
    "ReqNodeNotAvail, UnavailableNodes:node[1-2]": "down, drained or reserved",
}  # fmt: skip
PASSING = (
    "", "None", "Priority", "Resources", "Dependency", "BeginTime", "Licenses", "Reservation", "JobArrayTaskLimit",
    "Prolog", "Cleaning", "SchedDefer", "BurstBufferStageIn", "AssocGrpJobsLimit", "AssocGrpCpuLimit", "AssocGrpGRES",
    "QOSGrpNodeLimit", "QOSMaxJobsPerUserLimit", "QOSMaxGRESPerUser", "QOSMaxCpuPerUserLimit", "AssocMaxJobsLimit",
    "MaxGRESPerAccount", "AssocGrpCPURunMinutesLimit",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "A_REASON_TO_COME",
)  # fmt: skip


def job(reason: str = "", state: str = "PENDING", job_id: str = "12") -> Job:
    return Job(job_id, "token", state, reason)


@pytest.mark.parametrize("reason", HOPELESS)
def test_what_needs_somebody_to_act_is_said_with_the_way_out(reason: str) -> None:
    found = blocking_reason(job(reason))
    assert found is not None and HOPELESS[reason] in found.meaning
    assert found.fix.format(job="12")


@pytest.mark.parametrize("reason", PASSING)
def test_what_passes_with_time_is_no_obstacle(reason: str) -> None:
    assert blocking_reason(job(reason)) is None


def test_only_a_job_that_waits_can_be_kept_from_starting() -> None:
    assert blocking_reason(job("JobHeldUser", "REQUEUE_HOLD")) is not None
    assert (
        blocking_reason(job("JobHeldUser", "RUNNING")) is None
        and blocking_reason(job("JobHeldUser", "CANCELLED")) is None
    )


def test_every_row_speaks_of_some_reason() -> None:
    spoken = {found.pattern for reason in HOPELESS if (found := blocking_reason(job(reason))) is not None}
    assert spoken == {row.pattern for row in PENDING_REASONS}


# --- what a person is told ------------------------------------------------------------------------------------------


def state(name: StateName, slurm: Job | None, **fields: object) -> RunState:
    return dataclasses.replace(RunState("run", name, 1, job=slurm), **fields)  # type: ignore[arg-type]


def test_obstacles_are_said_once_an_array_with_the_command_to_type() -> None:
    held = {f"r{n}": state("QUEUED", job("JobHeldUser", job_id=f"12_{n}")) for n in range(3)}
    alone = {f"s{n}": state("QUEUED", job("JobHeldUser", job_id="13_7")) for n in range(2)}
    waiting = {"w": state("QUEUED", job("Resources")), "x": state("CANCELLED", job("JobHeldUser"))}
    assert blocked_jobs(held | alone | waiting) == [
        "job 12 (3 runs) cannot start: its user holds it (JobHeldUser). Fix: scontrol release 12",
        "job 13_7 (2 runs) cannot start: its user holds it (JobHeldUser). Fix: scontrol release 13_7",
    ]


@pytest.mark.parametrize(("run", "words"), [
    (state("QUEUED", job("Resources")), "job 12 PENDING (Resources)"),
    (state("QUEUED", dataclasses.replace(job(), expected_start=0.0)), "job 12 PENDING, expected to start at 19"),
    (state("QUEUED", job(state="UNKNOWN")), "job 12, not yet seen in squeue"),
    (state("QUEUED", dataclasses.replace(job(state="RUNNING"), nodes="node[1-2]")), "job 12 on node[1-2]"),
    (state("RUNNING", dataclasses.replace(job(state="SUSPENDED"), nodes="node1")), "job 12 on node1 (SUSPENDED)"),
    (state("PLANNED", job(state="FAILED"), abandoned=True, launches=1), "job 12 ended as FAILED before this run began"),
    (state("PLANNED", job(state="FAILED"), abandoned=True, launches=2), "began (2 jobs in a row did)"),
    (state("CANCELLED", job(state="COMPLETED"), abandoned=True, launches=1), "cancelled before it began"),
    (
        state("CANCELLED", job(state="NODE_FAIL"), abandoned=True, launches=1, outcome=CANCELLED),
        "job 12 ended as NODE_FAIL before this run began",
    ),
    (state("COMPLETED", job(state="FAILED")), ""),
    (state("QUEUED", None), ""),
])  # fmt: skip
def test_a_line_says_what_a_run_s_job_does(run: RunState, words: str) -> None:
    said = describe_job(run)
    assert words in said and bool(words) == bool(said)


def test_what_does_not_answer_is_said() -> None:
    assert slurm_faults(Jobs()) == [] and doubtful_jobs(Jobs()) == []
    assert slurm_faults(Jobs(fault="squeue has not answered since 12:00:00 (x)")) == [
        "squeue has not answered since 12:00:00 (x); states are as last known"
    ]
    (line,) = slurm_faults(Jobs(accounting=False))
    assert "no accounting here" in line
    (line,) = doubtful_jobs(Jobs(doubtful=frozenset(map(str, range(10, 20)))))
    assert line.startswith("job 10, 11, 12, 13, 14, ...: not in squeue")


# --- patience -------------------------------------------------------------------------------------------------------


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def scancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which a script, in place of scancel, records its arguments."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\ntest -e {tmp_path}/down && exit 1\necho "$@" >> {tmp_path}/calls\n')
    (tmp_path / "scancel").chmod(0o755)
    return tmp_path / "calls"


def test_a_job_that_has_waited_for_too_long_is_taken_out_once(scancelled: Path) -> None:
    clock = Clock()
    patience = PendingTimeout(10, clock)
    array = Submission("token", "token", ("a", "b", "c"), NOW, "host", "12")
    jobs = Jobs({job_id: job("Resources", word, job_id) for job_id, word in
                 (("12_0", "PENDING"), ("12_1", "RUNNING"), ("12_2", "CANCELLED"))})  # fmt: skip
    assert patience.cancel_overdue([array], jobs) == []
    clock.now = NOW + 599
    assert patience.cancel_overdue([array], jobs) == [] and not scancelled.exists()
    clock.now = NOW + 601
    (line,) = patience.cancel_overdue([array], jobs)
    why = "it waited longer than max_pending_minutes, 10 min (Resources)"
    assert line == f"job 12_0 is cancelled: {why}"
    assert patience.cancelled == {"12_0": why}
    assert scancelled.read_text().split() == ["--quiet", "12_0"]
    assert patience.cancel_overdue([array], jobs) == [], "Slurm may not have heard yet"


def test_a_clock_that_is_set_forward_takes_out_nothing(scancelled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, jobs = [Submission("token", "chain", ("a",), NOW, "host", "12")], Jobs({"12": job("Priority")})
    patience = PendingTimeout(10)
    for wall in (NOW, NOW + 86_400):
        monkeypatch.setattr("time.time", lambda wall=wall: wall)
        assert patience.cancel_overdue(chain, jobs) == []
    assert not scancelled.exists()


def test_waiting_for_jobs_of_the_same_sweep_does_not_count(scancelled: Path) -> None:
    clock = Clock()
    patience = PendingTimeout(10, clock)
    chain = [Submission("token", "chain", ("a",), NOW, "host", "12")]
    clock.now = NOW + 3000
    assert patience.cancel_overdue(chain, Jobs({"12": job("Dependency")})) == []
    clock.now = NOW + 3599
    assert patience.cancel_overdue(chain, Jobs({"12": job("Priority")})) == []
    clock.now = NOW + 3601
    assert len(patience.cancel_overdue(chain, Jobs({"12": job("Priority")}))) == 1


def test_without_a_limit_nothing_is_taken_out(scancelled: Path) -> None:
    chain = [Submission("token", "chain", ("a",), 0.0, "host", "12")]
    assert (
        PendingTimeout(None, Clock()).cancel_overdue(chain, Jobs({"12": job("Priority")})) == []
        and not scancelled.exists()
    )


def test_a_scancel_that_fails_is_tried_again(scancelled: Path) -> None:
    clock = Clock()
    patience = PendingTimeout(10, clock)
    chain = [Submission("token", "chain", ("a",), NOW, "host", "12")]
    assert patience.cancel_overdue(chain, Jobs({"12": job("Priority")})) == []
    clock.now = NOW + 601
    (scancelled.parent / "down").touch()
    (line,) = patience.cancel_overdue(chain, Jobs({"12": job("Priority")}))
    assert "could not be cancelled" in line and patience.cancelled == {}
    (scancelled.parent / "down").unlink()
    (line,) = patience.cancel_overdue(chain, Jobs({"12": job("Priority")}))
    assert "is cancelled" in line
