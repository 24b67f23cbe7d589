"""Test the states of runs, from the records on disk, locks held by this process, and the answers of Slurm."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launch.common.atomic_files import JsonLines, write_json
from launch.common.file_lock import Lock, this_process
from launch.contract.bundle import Beginning, BundleOrder, EarlyStop, Step, latest_outcomes
from launch.contract.outcomes import Expectation, Outcome, outcome_to_json
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import Limits, Plan, Precedents, read_plan
from launch.contract.records.digest import digest_records
from launch.contract.skipped_runs import why_skipped
from launch.failures.classes import CLASS_OF_JOB_STATE
from launch.slurm.job_states import ENDED, RUNNING, WAITING
from orchestrator.errors import SystemFault
from orchestrator.slurm.job_listing import GONE, UNHEARD, Job
from orchestrator.submit import idle_jobs
from orchestrator.submit.attempts_to_begin import attempts_to_begin
from orchestrator.submit.cancel import cancel
from orchestrator.submit.idle_jobs import has_idle_jobs, withdraw_idle_jobs
from orchestrator.submit.local_queue import has_pending
from orchestrator.sweeps.run_state import RunState, live_runs, open_submissions, read_state, read_states
from orchestrator.sweeps.slurm_jobs import Jobs
from orchestrator.sweeps.submissions import Submission, read_submissions, write_submission
from tests.planned import CPU_HOST
from tests.records import unbegun, write_sweep


class Sweep:
    """A sweep of one bundle: eager, compiled, eager, compiled. No run has begun."""

    def __init__(self, root: Path) -> None:
        self.paths = write_sweep(root / "written", steps=4, edit=unbegun)
        self.plan: Plan = read_plan(self.paths)
        (planned,) = self.plan.bundles
        self.run_ids = planned.run_ids
        self.bundle: BundlePaths = self.paths.bundle(planned.bundle_id)
        self.supervisor = this_process()

    def order(self, *schedule: tuple[int, int], step: Step | None = None) -> None:
        """Order attempts. ``schedule`` has pairs (index of the run, attempt)."""
        pairs = tuple((self.run_ids[run], attempt) for run, attempt in schedule)
        order = BundleOrder(
            self.bundle.root.name, "workload", pairs, Limits(), 1, ("cpu",), step=step, precedents=self.plan.precedents
        )
        write_json(self.bundle.order, order)

    def begin(self, run: int, attempt: int = 1, outcome: str | None = None, **ending: object) -> None:
        paths = self.paths.run(self.run_ids[run]).attempt(attempt)
        with JsonLines(self.bundle.begun) as lines:
            lines.write(Beginning(self.run_ids[run], attempt, time.time(), self.supervisor))
        paths.logs.mkdir(parents=True)
        if outcome:
            record = Outcome(outcome, "measure", "a", 1.0, time.time(), **ending)  # type: ignore[arg-type]
            write_json(paths.outcome, outcome_to_json(paths, record))

    def states(self, **jobs: str) -> list[str]:
        """Return the states of the runs. ``jobs`` has the state of job 12 as ``j12``. Without jobs, Slurm is not asked."""
        return [state.name + ("*" if state.alive else "") for state in self.all(**jobs)]

    def all(self, **jobs: str) -> list[RunState]:
        known = {name[1:]: Job(name[1:], "token", state) for name, state in jobs.items()}
        states = read_states(self.paths, self.plan, Jobs(known) if jobs else None)
        assert tuple(states) == self.run_ids
        return list(states.values())

    def end_elsewhere(self, run_id: str, *, attempt: int = 1, outcome: str = "CONFIG", **ending: Any) -> None:
        """Write the outcome of a run of another bundle."""
        paths = self.paths.run(run_id).attempt(attempt)
        paths.root.mkdir(parents=True)
        record = Outcome(outcome, "init", "a", 1.0, 2.0, repeats_alike=outcome == "CONFIG", **ending)  # type: ignore[arg-type]
        write_json(paths.outcome, outcome_to_json(paths, record))

    def why_skipped(self, run_id: str, precedents: Mapping[str, Precedents], *ordered: tuple[str, int]) -> str:
        order = BundleOrder("bundle", "workload", ordered, Limits(), 1, ("cpu",))
        return why_skipped(run_id, latest_outcomes(self.paths, order), precedents)

    def submit(self, job_id: str | None, *schedule: tuple[int, int]) -> None:
        """Order it and submit it to Slurm, or leave unknown whether the submission arrived."""
        self.order(*schedule, step=Step(1, 2, 1, "python"))
        bundles, number = (self.bundle.root.name,), len(read_submissions(self.paths))
        pairs = tuple((self.run_ids[run], attempt) for run, attempt in schedule)
        # Clocks differ and may be set back, so times show no order.
        submission = Submission(f"token-{job_id}", "token", bundles, -number, "host", job_id, "", number, (pairs,))
        write_submission(self.paths, submission)

    def take(self, job: str = "12") -> None:
        """Take the bundle as another supervisor that Slurm has started."""
        self.supervisor = dataclasses.replace(self.supervisor, token=os.urandom(4).hex())
        with JsonLines(self.bundle.allocations) as lines:
            line = {"allocation": 1, "time": time.time(), "job": job, "nodes": ["node1"]}
            lines.write(line | dataclasses.asdict(self.supervisor))


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def kill(lock: Lock, path: Path) -> None:
    """Leave what a killed holder leaves: a free lock that names a process that no longer exists."""
    lock.release()
    write_json(path, dataclasses.asdict(dataclasses.replace(this_process(), pid=1)))


def taken(path: Path) -> Lock:
    lock = Lock.try_acquire(path)
    assert lock is not None
    return lock


def test_a_run_from_the_plan_to_its_outcome(sweep: Sweep) -> None:
    assert sweep.states() == ["PLANNED"] * 4
    sweep.order((0, 1), (1, 1))
    assert sweep.states() == ["PLANNED"] * 4, "ordered, but nobody lives to begin it"
    queue = taken(sweep.paths.queue_lock)
    assert sweep.states() == ["QUEUED*", "QUEUED*", "PLANNED", "PLANNED"]
    taken(sweep.bundle.lock)
    queue.release()
    assert sweep.states() == ["QUEUED*", "QUEUED*", "PLANNED", "PLANNED"]
    sweep.begin(0)
    assert sweep.states() == ["RUNNING*", "QUEUED*", "PLANNED", "PLANNED"]
    sweep.begin(1, outcome="COMPLETED")
    assert sweep.states() == ["RUNNING*", "COMPLETED", "PLANNED", "PLANNED"]


def test_a_run_whose_supervisor_died_is_interrupted_even_while_another_one_lives(sweep: Sweep) -> None:
    """This holds whatever the clocks showed in the meantime."""
    sweep.order((0, 1), (1, 1))
    sweep.supervisor = dataclasses.replace(this_process(), pid=1)
    first = taken(sweep.bundle.lock)
    sweep.begin(0)
    kill(first, sweep.bundle.lock)
    assert sweep.states()[:2] == ["INTERRUPTED", "PLANNED"]
    taken(sweep.bundle.lock)
    os.utime(sweep.bundle.lock, (1.0, 1.0))
    assert sweep.states()[:2] == ["INTERRUPTED", "QUEUED*"]
    sweep.supervisor = this_process()
    sweep.begin(1)
    os.utime(sweep.paths.run(sweep.run_ids[1]).attempt(1).root.parent, (0.0, 0.0))
    assert sweep.states()[:2] == ["INTERRUPTED", "RUNNING*"]


def test_a_living_supervisor_whose_name_or_lines_cannot_be_read_may_run_anything(sweep: Sweep) -> None:
    sweep.order((0, 1))
    taken(sweep.bundle.lock)
    sweep.begin(0)
    sweep.bundle.lock.write_text("")
    assert sweep.states()[0] == "RUNNING*"
    sweep.bundle.begun.write_text("{")
    assert sweep.states()[0] == "RUNNING*"


def test_another_attempt_is_the_run_s_state(sweep: Sweep) -> None:
    sweep.begin(0, outcome="FAILED")
    sweep.order((0, 2))
    assert sweep.states()[0] == "FAILED"
    taken(sweep.bundle.lock)
    assert sweep.states()[0] == "QUEUED*"
    sweep.begin(0, attempt=2, outcome="COMPLETED")
    assert sweep.states()[0] == "COMPLETED"
    assert read_states(sweep.paths, sweep.plan)[sweep.run_ids[0]].next_attempt == 3


def test_ten_attempts_are_counted_as_numbers(sweep: Sweep) -> None:
    for attempt in range(1, 11):
        sweep.begin(0, attempt, outcome="FAILED")
    assert read_states(sweep.paths, sweep.plan)[sweep.run_ids[0]].next_attempt == 11


def test_a_cancelled_bundle(sweep: Sweep) -> None:
    sweep.order((0, 1), (1, 1))
    taken(sweep.paths.queue_lock)
    taken(sweep.bundle.lock)
    sweep.begin(0)
    sweep.bundle.cancel.touch()
    assert sweep.states()[:2] == ["RUNNING*", "CANCELLED"], "a run that has begun ends first"


def test_a_damaged_outcome_is_none_and_a_damaged_order_is_a_fault(sweep: Sweep) -> None:
    sweep.begin(0, outcome="COMPLETED")
    sweep.paths.run(sweep.run_ids[0]).attempt(1).outcome.write_text('{"outcome": "COMPLETED"}')
    state = sweep.all()[0]
    assert (state.name, state.outcome, state.next_attempt) == ("INTERRUPTED", None, 2)
    assert state.damaged.startswith("outcome.json: not an outcome of this version (")
    assert not any(state.damaged for state in sweep.all()[1:])
    sweep.order((1, 1))
    taken(sweep.paths.queue_lock)
    sweep.bundle.order.write_text('{"schedule": []}')
    with pytest.raises(SystemFault, match=r"bundle\.json: not a bundle of this version .*; delete it"):
        sweep.states()


def test_a_damaged_outcome_is_of_a_run_that_has_ended_whoever_lives(sweep: Sweep) -> None:
    sweep.order((0, 1), (1, 1))
    taken(sweep.bundle.lock)
    sweep.begin(0)
    assert sweep.states()[:2] == ["RUNNING*", "QUEUED*"]
    sweep.paths.run(sweep.run_ids[0]).attempt(1).outcome.write_text("{")
    assert sweep.states()[:2] == ["INTERRUPTED", "QUEUED*"]
    sweep.submit("12", (0, 1), (1, 1))
    assert sweep.states(j12="RUNNING")[0] == sweep.states(j12="NODE_FAIL")[0] == "INTERRUPTED"


def test_live_runs_are_of_all_bundles_on_disk(sweep: Sweep) -> None:
    sweep.order((0, 1), (1, 1))
    assert list(live_runs(sweep.paths)) == []
    taken(sweep.paths.queue_lock)
    forgotten = sweep.paths.bundle("of-an-earlier-plan")
    order = BundleOrder("of-an-earlier-plan", "workload", (("run-r0", 1),), Limits(), 1, ("cpu",))
    write_json(forgotten.order, order)
    assert dict(live_runs(sweep.paths)) == {sweep.bundle: list(sweep.run_ids[:2]), forgotten: ["run-r0"]}


def test_records_have_another_digest_when_something_of_a_run_changed(sweep: Sweep) -> None:
    def digest() -> str:
        return digest_records(sweep.paths, sweep.run_ids)

    attempt = sweep.paths.run(sweep.run_ids[0]).attempt(1)
    digests = [digest()]
    sweep.begin(0)
    digests.append(digest())
    attempt.metrics.write_text("{}\n")
    digests.append(digest())
    attempt.outcome.write_text("{")
    digests.append(digest())
    for path in (attempt.environment, attempt.events(0), attempt.events(1), sweep.paths.run(sweep.run_ids[1]).spec):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
        digests.append(digest())
    attempt.events(0).write_text("[]")
    digests.append(digest())
    sweep.begin(0, attempt=2, outcome="COMPLETED")
    digests.append(digest())
    attempt.metrics.write_text("[]\n")
    digests.append(digest())
    attempt.log(0).write_text("no report reads it")
    assert digest() == digests[-1]
    attempt.root.rename(attempt.root.with_name("away"))
    digests.append(digest())
    sweep.paths.plan.write_text(sweep.paths.plan.read_text() + "\n")
    digests.append(digest())
    assert len(set(digests)) == len(digests)
    for path in sweep.paths.root.rglob("*"):
        os.utime(path, (1.0, 1.0))
    assert digest() == digests[-1], "times say nothing: clocks of nodes differ"


def test_sweep_paths_alone_tell_nothing(tmp_path: Path) -> None:
    assert list(live_runs(SweepPaths(tmp_path / "nowhere"))) == []


# --- under Slurm ----------------------------------------------------------------------------------------------------

LIVING = sorted({*WAITING, *RUNNING, UNHEARD, "A_STATE_TO_COME"})


@pytest.mark.parametrize("job", LIVING)
def test_while_its_job_lives_a_run_waits_or_runs(sweep: Sweep, job: str) -> None:
    """The lock decides nothing, because it was taken on a node. An unknown state of a job ends nothing."""
    sweep.submit("12", (0, 1), (1, 1), (2, 1), (3, 1))
    assert sweep.states(j12=job) == ["QUEUED*"] * 4
    sweep.take()
    sweep.begin(0, outcome="COMPLETED")
    sweep.begin(1)
    assert sweep.states(j12=job) == ["COMPLETED", "RUNNING*", "QUEUED*", "QUEUED*"]
    kill(taken(sweep.bundle.lock), sweep.bundle.lock)
    assert sweep.states(j12=job) == ["COMPLETED", "RUNNING*", "QUEUED*", "QUEUED*"]
    assert all(state.job is not None and state.job.job_id == "12" for state in sweep.all(j12=job))


@pytest.mark.parametrize("job", sorted(ENDED))
def test_when_its_job_has_ended_a_run_has_ended_or_will_not_begin(sweep: Sweep, job: str) -> None:
    sweep.submit("12", (0, 1), (1, 1), (2, 1))
    sweep.take()
    write_json(
        sweep.bundle.lock, dataclasses.asdict(dataclasses.replace(sweep.supervisor, host="node1", boot="its own"))
    )
    sweep.begin(0, outcome="COMPLETED")
    sweep.begin(1)
    unbegun = "CANCELLED" if job in ("CANCELLED", "REVOKED") else "PLANNED"
    assert sweep.states(j12=job) == ["COMPLETED", CLASS_OF_JOB_STATE[job].outcome, unbegun, unbegun]
    completed, ended, abandoned, _ = sweep.all(j12=job)
    assert completed.recorded and not ended.recorded and ended.outcome is not None
    assert not sweep.paths.run(sweep.run_ids[1]).attempt(1).outcome.exists(), "looking changes nothing"
    assert abandoned.abandoned and not completed.abandoned and not ended.abandoned
    assert abandoned.launches == 0, "it was launched, and got somewhere"


def test_without_a_word_from_slurm_what_was_handed_over_goes_on(sweep: Sweep) -> None:
    sweep.submit("12", (0, 1), (1, 1))
    sweep.take()
    sweep.begin(0)
    states = read_states(sweep.paths, sweep.plan, Jobs(fault="squeue has not answered"))
    assert [state.name for state in states.values()] == ["RUNNING", "QUEUED", "PLANNED", "PLANNED"]


def test_a_submission_that_may_never_have_come_to_pass_is_none(sweep: Sweep) -> None:
    sweep.submit(None, (0, 1))
    assert sweep.states(j12="RUNNING")[0] == "PLANNED"


def test_launches_are_counted_from_the_last_attempt_that_was_begun(sweep: Sweep) -> None:
    sweep.submit("11", (0, 1), (1, 1))
    assert [state.launches for state in sweep.all(j11="NODE_FAIL")] == [1, 1, 0, 0]
    sweep.submit("12", (0, 1), (1, 1))
    assert [state.launches for state in sweep.all(j11="NODE_FAIL", j12="FAILED")] == [2, 2, 0, 0]
    assert [state.launches for state in sweep.all(j11="NODE_FAIL", j12="PENDING")] == [0, 0, 0, 0]
    sweep.begin(0)
    assert [state.launches for state in sweep.all(j11="NODE_FAIL", j12="FAILED")] == [0, 0, 0, 0]
    sweep.submit("13", (1, 1))
    assert [state.launches for state in sweep.all(j13="FAILED", j12="FAILED", j11="FAILED")] == [0, 1, 0, 0]


def test_of_two_jobs_of_one_bundle_the_one_that_lives_counts(sweep: Sweep) -> None:
    """An sbatch that was believed dead was still received. Its job finds that the bundle is taken, and ends."""
    sweep.submit("11", (0, 1))
    sweep.submit("12", (0, 1))
    sweep.take("11")
    sweep.begin(0)
    assert sweep.states(j11="RUNNING", j12="COMPLETED")[0] == "RUNNING*"
    assert sweep.states(j11="TIMEOUT", j12="COMPLETED")[0] == "FAILED"


def test_an_id_that_slurm_gave_twice_is_the_later_job_s(sweep: Sweep) -> None:
    """The controller was killed and forgot the first job. Both jobs belong to one chain and have its name."""
    sweep.submit("12", (0, 1))
    other = Submission("token-other", "token", ("bundle-other",), 0.0, "host", "12", number=1)
    write_submission(sweep.paths, other)
    assert sweep.states(j12="RUNNING")[0] == "PLANNED"


def test_an_attempt_of_an_earlier_order_is_interrupted(sweep: Sweep) -> None:
    sweep.submit("11", (0, 1))
    sweep.begin(0)
    sweep.submit("12", (1, 1))
    assert sweep.states(j11="NODE_FAIL", j12="RUNNING")[:2] == ["INTERRUPTED", "QUEUED*"]
    sweep.submit("12", (0, 2), (1, 1))
    assert sweep.states(j11="NODE_FAIL", j12="RUNNING")[:2] == ["QUEUED*", "QUEUED*"]


def test_the_attempt_that_a_supervisor_adds_to_an_ordered_one_is_the_run_s_state(sweep: Sweep) -> None:
    """It adds one without step checks if memory ran out in a check."""
    sweep.submit("12", (0, 1), (1, 1))
    sweep.take()
    sweep.begin(1, outcome="COMPLETED")
    sweep.begin(0, 1, outcome="CUDA_OOM")
    sweep.begin(0, 2)
    assert sweep.states(j12="RUNNING")[:2] == ["RUNNING*", "COMPLETED"]
    assert [submission.job_id for submission in open_submissions(sweep.paths)] == ["12"]
    assert sweep.states(j12="TIMEOUT")[:2] == ["TIMEOUT", "COMPLETED"]


@pytest.mark.parametrize("job", ["RUNNING", "COMPLETED"])
def test_what_a_job_had_begun_when_it_was_requeued_has_ended(sweep: Sweep, job: str) -> None:
    sweep.submit("12", (0, 1), (1, 1))
    sweep.take()
    sweep.begin(0)
    assert sweep.states(j12="PENDING")[0] == "RUNNING*", "squeue may not have heard yet that it runs"
    sweep.take()
    os.utime(sweep.bundle.allocations, (1.0, 1.0))
    first, second, *_ = sweep.all(j12=job)
    assert first.outcome is not None and first.outcome.failure_class == "REQUEUED" and not first.alive
    assert second.name == ("QUEUED" if job == "RUNNING" else "PLANNED")


def test_a_damaged_line_hides_no_other(sweep: Sweep) -> None:
    sweep.submit("12", (0, 1), (1, 1))
    for path in (sweep.bundle.allocations, sweep.bundle.begun):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{\n[]\n")
    sweep.take()
    sweep.begin(0)
    sweep.take()
    first, *_ = sweep.all(j12="RUNNING")
    assert first.outcome is not None and first.outcome.failure_class == "REQUEUED"
    with open(sweep.bundle.allocations, "a") as lines:
        lines.write("{\n")
    assert sweep.states(j12="RUNNING")[0] == "RUNNING*", "who took it last is unknown"


def test_folders_that_are_no_attempts_do_not_count(sweep: Sweep) -> None:
    sweep.begin(0, outcome="COMPLETED")
    attempts = sweep.paths.run(sweep.run_ids[0]).root / "attempts"
    for name in ("9" * 255, "007", "0", "1x", "-2", "2 (copy)", "²", "٣"):
        (attempts / name).mkdir()
    assert (sweep.all()[0].name, sweep.all()[0].next_attempt) == ("COMPLETED", 2)


def test_what_was_cancelled_is_not_made_again_unasked(sweep: Sweep) -> None:
    """A node failed during one run. Then somebody cancelled the run, with the command or by cancelling the job of the
    retry."""
    sweep.begin(0, outcome="NODE_FAIL")
    sweep.begin(1, outcome="NUMERIC")
    sweep.submit("12", (0, 2), (1, 2), (2, 1))
    assert sweep.states(j12="NODE_FAIL")[:3] == ["NODE_FAIL", "NUMERIC", "PLANNED"]
    assert sweep.states(j12="CANCELLED")[:3] == ["CANCELLED", "NUMERIC", "CANCELLED"]
    write_json(sweep.bundle.cancel, [sweep.run_ids[0]])
    assert sweep.states(j12="NODE_FAIL")[:3] == ["CANCELLED", "NUMERIC", "PLANNED"]
    assert sweep.states(j12="PENDING")[:3] == ["CANCELLED", "QUEUED*", "QUEUED*"]
    write_json(sweep.bundle.cancel, None)
    assert sweep.states(j12="PENDING")[:3] == ["CANCELLED", "NUMERIC", "CANCELLED"]


def test_a_cancelled_supervisor_that_found_no_space_for_an_outcome_was_cancelled(sweep: Sweep) -> None:
    sweep.submit("12", (0, 1), (1, 1))
    sweep.take()
    sweep.begin(0)
    assert sweep.states(j12="FAILED")[0] == "FAILED"
    sweep.bundle.cancel.touch()
    assert sweep.states(j12="RUNNING")[0] == "RUNNING*"
    assert sweep.states(j12="FAILED")[:2] == ["CANCELLED", "CANCELLED"]


def test_what_the_host_took_over_is_the_host_s(sweep: Sweep) -> None:
    sweep.submit("12", (0, 1))
    sweep.order((0, 1), (1, 1))
    assert sweep.states(j12="NODE_FAIL")[:2] == ["PLANNED", "PLANNED"]
    taken(sweep.bundle.lock)
    assert sweep.states(j12="NODE_FAIL")[:2] == ["QUEUED*", "QUEUED*"]
    sweep.begin(0)
    assert sweep.states(j12="NODE_FAIL")[:2] == ["RUNNING*", "QUEUED*"]


def test_live_runs_know_jobs(sweep: Sweep) -> None:
    sweep.submit("12", (0, 1), (1, 1))
    sweep.take()
    sweep.begin(0, outcome="COMPLETED")
    assert list(live_runs(sweep.paths)) == []
    assert list(live_runs(sweep.paths, Jobs({"12": Job("12", "token", "PENDING")}))) == [
        (sweep.bundle, [sweep.run_ids[1]])
    ]
    assert list(live_runs(sweep.paths, Jobs({"12": Job("12", "token", GONE)}))) == []


def test_slurm_is_asked_only_about_what_it_may_still_say_something_of(sweep: Sweep) -> None:
    assert open_submissions(sweep.paths) == []
    sweep.submit("12", (0, 1), (1, 1))
    sweep.begin(0, outcome="COMPLETED")
    assert [submission.job_id for submission in open_submissions(sweep.paths)] == ["12"]
    sweep.begin(1, outcome="NUMERIC")
    assert open_submissions(sweep.paths) == []


def test_one_run_alone_is_told_as_among_all(sweep: Sweep) -> None:
    sweep.submit("12", (0, 1), (1, 1))
    sweep.take()
    sweep.begin(0)
    jobs = Jobs({"12": Job("12", "token", "RUNNING")})
    states = read_states(sweep.paths, sweep.plan, jobs)
    assert [read_state(sweep.bundle, run_id, jobs) for run_id in sweep.run_ids] == list(states.values())


def test_a_run_that_no_verdict_needs_is_not_begun_by_anybody(sweep: Sweep) -> None:
    sweep.submit("12", (0, 1), (1, 1), (2, 1), (3, 1))
    sweep.take()
    sweep.begin(0, outcome="COMPLETED")
    sweep.begin(1, outcome="COMPLETED")
    assert sweep.states(j12="RUNNING") == ["COMPLETED", "COMPLETED", "QUEUED*", "QUEUED*"]
    write_json(sweep.bundle.early_stop, EarlyStop(1, 2, sweep.run_ids[2:]))
    done = ["COMPLETED", "COMPLETED", "NOT_NEEDED", "NOT_NEEDED"]
    assert sweep.states(j12="RUNNING") == sweep.states(j12="COMPLETED") == sweep.states() == done
    assert not any(state.abandoned for state in sweep.all(j12="COMPLETED")), "nothing is submitted again"
    assert not open_submissions(sweep.paths), "Slurm is not asked for its job any more"
    sweep.order((2, 1), (3, 1))
    assert not has_pending(sweep.paths), "nor does the queue of a host begin it"
    write_json(sweep.bundle.cancel, None)
    assert sweep.states() == done
    sweep.begin(2, outcome="COMPLETED")
    assert sweep.states() == ["COMPLETED", "COMPLETED", "COMPLETED", "NOT_NEEDED"]


def test_a_repeat_that_would_only_fail_alike_is_not_begun_before_its_first_one_is_tried_again(sweep: Sweep) -> None:
    sweep.submit("12", (0, 1), (1, 1), (2, 1), (3, 1))
    sweep.take()
    sweep.begin(0, outcome="COMPLETED")
    sweep.begin(1, outcome="CONFIG", failure_class="UNSUPPORTED", repeats_alike=True)
    assert sweep.states(j12="RUNNING") == ["COMPLETED", "CONFIG", "SKIPPED", "QUEUED*"]
    assert "repeat 0 ended as CONFIG (UNSUPPORTED) in measure" in sweep.all()[2].why_unbegun
    sweep.begin(3, outcome="COMPLETED")
    done = ["COMPLETED", "CONFIG", "SKIPPED", "COMPLETED"]
    assert sweep.states(j12="COMPLETED") == sweep.states() == done
    assert not any(state.abandoned for state in sweep.all(j12="COMPLETED")), "nothing is submitted again"
    assert not open_submissions(sweep.paths), "Slurm is not asked for its job any more"
    sweep.order((2, 1))
    assert not has_pending(sweep.paths), "nor does the queue of a host begin it"
    sweep.order((1, 2), (2, 1))
    queue = taken(sweep.paths.queue_lock)
    assert sweep.states() == ["COMPLETED", "QUEUED*", "QUEUED*", "COMPLETED"], "what `resume --failed` orders"
    queue.release()
    sweep.begin(1, 2, outcome="COMPLETED")
    assert has_pending(sweep.paths) and sweep.states() == ["COMPLETED", "COMPLETED", "PLANNED", "COMPLETED"]


@pytest.mark.parametrize(
    ("second", "skipped"),
    [(("CUDA_OOM", "OOM"), True), (("CUDA_OOM", "OOM_CAPTURE"), False), (("COMPLETED", ""), False), (None, False)],
)
def test_any_other_failure_takes_a_second_repeat_to_confirm_it(
    tmp_path: Path, second: tuple[str, str] | None, skipped: bool
) -> None:
    sweep = Sweep(tmp_path)
    cell = sweep.run_ids[1].removesuffix("-r0")
    for number, ending in enumerate([("CUDA_OOM", "OOM"), second]):
        if ending is not None:
            sweep.begin(number + 1, outcome=ending[0], failure_class=ending[1])
    assert bool(sweep.why_skipped(f"{cell}-r2", {})) == skipped
    assert not sweep.why_skipped(f"{cell}-r2", {}, (f"{cell}-r1", 2)), "an attempt that is ordered may succeed"


def test_graphed_runs_are_not_begun_once_their_eager_baseline_cannot_run(sweep: Sweep) -> None:
    eager, _ = sweep.plan.cells
    sweep.order((0, 1), (1, 1), (2, 1), (3, 1))
    sweep.begin(0, outcome="ENVIRONMENT", failure_class="IMPORT", repeats_alike=True)
    assert sweep.states() == ["ENVIRONMENT", "SKIPPED", "SKIPPED", "SKIPPED"]
    reason = f"no eager run to compare with, since repeat 0 of {eager.cell_id} ended as ENVIRONMENT (IMPORT) in measure"
    assert reason in sweep.all()[1].why_unbegun
    assert not has_pending(sweep.paths)
    sweep.begin(0, 2, outcome="COMPLETED")
    assert has_pending(sweep.paths) and sweep.states() == ["COMPLETED", "PLANNED", "PLANNED", "PLANNED"]


@pytest.mark.parametrize(
    ("endings", "first", "later"),
    [
        (["CUDA_OOM"], False, True),  # whether graphs fit is known after one repeat
        (["CUDA_OOM", "COMPLETED"], False, False),
        (["CUDA_OOM", "CANCELLED"], False, True),
        (["CUDA_OOM", "NODE_FAIL"], False, True),
        (["CUDA_OOM", "HANG"], False, True),
        (["CUDA_OOM", "CUDA_OOM"], True, True),
        (["FAILED"], False, False),
        (["FAILED", "FAILED"], True, True),
        (["NUMERIC", "NUMERIC"], False, False),  # curves up to the first NaN can be compared
        (["NODE_FAIL", "NODE_FAIL"], False, False),
        (["COMPLETED"], False, False),
    ],
)
def test_only_a_lasting_failure_of_the_eager_baseline_spares_graphed_runs(
    sweep: Sweep, endings: list[str], first: bool, later: bool
) -> None:
    graphed, begun = sweep.plan.cells[1].cell_id, (0, 3)
    for run, ending in zip(begun, endings, strict=False):
        sweep.begin(run, outcome=ending)
    reasons = [sweep.why_skipped(f"{graphed}-r{repeat}", sweep.plan.precedents) for repeat in (0, 1)]
    assert [bool(reason) for reason in reasons] == [first, later]


def test_a_graphed_run_waits_no_longer_than_for_its_own_eager_run(sweep: Sweep) -> None:
    """Eager repeat 0 lacked memory, and repeat 1 has not ended. Nobody knows yet whether eager runs fit at all."""
    eager, graphed = (cell.cell_id for cell in sweep.plan.cells)
    sweep.begin(0, outcome="CUDA_OOM")
    assert sweep.why_skipped(f"{graphed}-r2", sweep.plan.precedents)
    sweep.end_elsewhere(f"{eager}-r2", outcome="COMPLETED")
    assert not sweep.why_skipped(f"{graphed}-r2", sweep.plan.precedents)
    assert sweep.why_skipped(f"{graphed}-r1", sweep.plan.precedents)


@pytest.mark.parametrize("expecting", [0, 1])
def test_a_cell_that_should_fail_spares_no_run_and_is_spared_none(sweep: Sweep, expecting: int) -> None:
    cells = list(sweep.plan.cells)
    cells[expecting] = dataclasses.replace(cells[expecting], expect=Expectation("CUDA_OOM"))
    sweep.plan = dataclasses.replace(sweep.plan, cells=tuple(cells))
    sweep.begin(0, outcome="ENVIRONMENT", repeats_alike=True)
    assert sweep.states() == ["ENVIRONMENT", "PLANNED", "PLANNED", "SKIPPED"]


@pytest.mark.parametrize(
    ("name", "node", "skipped"),
    [
        ("OPTIONS", "", True),
        ("OPTIONS", "node1", True),
        ("NO_PROGRAM", "", True),
        ("NO_PROGRAM", "node1", False),  # other nodes may have the program
        ("IMPORT", "", False),
    ],
)
def test_what_a_command_fails_by_whatever_its_numbers_are_fails_in_other_cells_too(
    sweep: Sweep, name: str, node: str, skipped: bool
) -> None:
    run, precedents = sweep.run_ids[1], {sweep.plan.cells[1].cell_id: Precedents(same_command=("other",))}
    assert not sweep.why_skipped(run, precedents), "the other cell has not begun"
    sweep.end_elsewhere("other-r0", failure_class=name, node=node)
    assert bool(sweep.why_skipped(run, precedents)) == skipped
    assert not sweep.why_skipped(run, precedents, ("other-r0", 2)), "its attempt that is ordered may succeed"


def test_a_job_whose_runs_are_all_skipped_is_taken_out_of_the_queue(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has cancelled its runs, so they begin in another job once the command succeeds."""
    cancelled: list[str] = []
    monkeypatch.setattr(idle_jobs, "scancel", cancelled.extend)
    waits, runs, ended = (Jobs({"12": Job("12", "token", state)}) for state in ("PENDING", "RUNNING", "CANCELLED"))
    eager, compiled = sweep.plan.cells
    eager = dataclasses.replace(eager, same_command="other")
    sweep.plan = dataclasses.replace(sweep.plan, cells=(eager, compiled))
    sweep.submit("12", (0, 1), (1, 1), (2, 1), (3, 1))
    assert withdraw_idle_jobs(sweep.paths, waits) == [] and not has_idle_jobs(
        sweep.paths, read_states(sweep.paths, sweep.plan, waits)
    )
    sweep.end_elsewhere("other-r0", failure_class="OPTIONS")
    assert sweep.states(j12="PENDING") == ["SKIPPED"] * 4
    assert not open_submissions(sweep.paths), "no state depends on this job"
    assert has_idle_jobs(sweep.paths, read_states(sweep.paths, sweep.plan, waits))
    assert withdraw_idle_jobs(sweep.paths, runs) == [] and not has_idle_jobs(
        sweep.paths, read_states(sweep.paths, sweep.plan, runs)
    )
    assert withdraw_idle_jobs(sweep.paths, waits) == cancelled == ["12"]
    assert withdraw_idle_jobs(sweep.paths, waits) == [] and not has_idle_jobs(
        sweep.paths, read_states(sweep.paths, sweep.plan, ended)
    )
    assert sweep.states(j12="CANCELLED") == ["SKIPPED"] * 4
    sweep.end_elsewhere("other-r0", attempt=2, outcome="COMPLETED")
    assert sweep.states(j12="CANCELLED") == ["PLANNED"] * 4
    sweep.submit("13", (0, 1), (1, 1), (2, 1), (3, 1))
    assert sweep.states(j13="PENDING") == ["QUEUED*"] * 4


def test_a_job_that_has_begun_a_run_is_left_in_the_queue(sweep: Sweep) -> None:
    """Slurm has requeued it. When it starts again, its supervisor writes the outcome of that run."""
    sweep.submit("12", (0, 1), (1, 1), (2, 1), (3, 1))
    sweep.begin(0, outcome="ENVIRONMENT", repeats_alike=True)
    assert sweep.states(j12="PENDING") == ["ENVIRONMENT", "SKIPPED", "SKIPPED", "SKIPPED"]
    assert withdraw_idle_jobs(sweep.paths, Jobs({"12": Job("12", "token", "PENDING")})) == []


def test_an_order_to_try_a_failed_run_again_outlives_its_job_unless_somebody_cancelled_it(sweep: Sweep) -> None:
    sweep.begin(0, outcome="COMPLETED")
    sweep.begin(1, outcome="CANCELLED")
    sweep.submit("12", (0, 2), (1, 2))
    assert [state.abandoned for state in sweep.all(j12="NODE_FAIL")] == [True, True, False, False]
    assert not any(state.abandoned for state in sweep.all(j12="CANCELLED"))
    write_json(sweep.bundle.cancel, [sweep.run_ids[1]])
    assert [state.abandoned for state in sweep.all(j12="NODE_FAIL")] == [True, False, False, False]


def test_cancel_names_a_failed_run_whose_next_attempt_has_not_begun(sweep: Sweep) -> None:
    sweep.begin(0, outcome="COMPLETED")
    sweep.begin(1, outcome="NUMERIC")
    sweep.order((0, 2), (1, 2))
    queue = taken(sweep.paths.queue_lock)
    cancelled, states = cancel(sweep.paths, sweep.plan, None, print)
    assert cancelled == sorted(sweep.run_ids[:2])
    assert [state.name for state in states.values()][:2] == ["COMPLETED", "NUMERIC"], "their results stay"
    assert cancel(sweep.paths, sweep.plan, None, print)[0] == []
    queue.release()


def test_an_order_to_try_a_failed_run_again_outlives_the_queue_of_this_host(sweep: Sweep) -> None:
    """Somebody has killed the queue, or the host has gone down."""
    sweep.begin(0, outcome="COMPLETED")
    sweep.begin(1, outcome="NUMERIC")
    sweep.order((0, 2), (1, 2))
    assert [state.abandoned for state in sweep.all()] == [False, True, False, False], "its partner has results"
    (again,) = attempts_to_begin(sweep.plan, read_states(sweep.paths, sweep.plan), CPU_HOST, "unfinished")
    assert again.schedule == tuple(zip(sweep.run_ids, (2, 2, 1, 1), strict=True))
    write_json(sweep.bundle.cancel, [sweep.run_ids[1]])
    assert not any(state.abandoned for state in sweep.all())
    queue = taken(sweep.paths.queue_lock)
    assert sweep.states() == ["QUEUED*", "NUMERIC", "PLANNED", "PLANNED"]
    queue.release()


def test_an_eager_run_is_not_made_again_for_graphed_runs_that_are_not_begun(sweep: Sweep) -> None:
    """`resume --failed` has ordered it for repeat 1 of a cell whose repeat 0 fails again."""
    sweep.begin(0, outcome="COMPLETED")
    sweep.begin(1, outcome="CONFIG", repeats_alike=True)
    sweep.begin(3, outcome="COMPLETED")
    sweep.submit("12", (0, 2), (1, 2), (2, 1), (3, 2))
    assert sweep.states(j12="RUNNING") == ["QUEUED*"] * 4
    sweep.begin(0, 2, outcome="COMPLETED")
    sweep.begin(1, 2, outcome="CONFIG", repeats_alike=True)
    assert sweep.states(j12="RUNNING") == ["COMPLETED", "CONFIG", "SKIPPED", "COMPLETED"]
    assert not any(state.abandoned for state in sweep.all(j12="COMPLETED"))
    write_json(sweep.paths.run(sweep.run_ids[3]).attempt(1).outcome, {})
    assert sweep.states(j12="RUNNING")[3] == "QUEUED*", "it has no results"


def test_an_eager_run_without_results_is_made_for_the_graphed_runs_that_wait_for_it(sweep: Sweep) -> None:
    sweep.begin(0, outcome="CUDA_OOM")
    sweep.begin(1, outcome="COMPLETED")
    sweep.begin(3, outcome="NODE_FAIL")
    sweep.submit("12", (2, 1), (3, 2))
    assert sweep.states(j12="RUNNING")[2:] == ["SKIPPED", "QUEUED*"]
    sweep.begin(3, 2, outcome="COMPLETED")
    assert sweep.states(j12="RUNNING")[2:] == ["QUEUED*", "COMPLETED"]
