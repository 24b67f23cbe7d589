"""Test watching a sweep under Slurm: when runs are retried, and when nothing is left to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.common.atomic_files import write_json
from launch.contract.bundle import BundleOrder, Step
from launch.contract.outcomes import Outcome, OutcomeName, outcome_to_json
from launch.contract.plan import Limits, read_plan
from orchestrator.slurm import polled_command
from orchestrator.sweeps.run_state import RunState
from orchestrator.sweeps.slurm_jobs import JobMonitor
from orchestrator.sweeps.submissions import Submission, write_submission
from orchestrator.workflow import watch_slurm
from tests.records import unbegun, write_sweep

SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


class Watched:
    """A sweep of one run, in job 12. A script replaces squeue. Each pause plays the next step of the scene."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        monkeypatch.setenv("PATH", str(root), prepend=":")
        monkeypatch.setattr(polled_command, "poll_interval", lambda took, failures: 0.0)
        monkeypatch.setattr(watch_slurm, "time", SimpleNamespace(sleep=self._sleep, monotonic=time.monotonic))
        self.sweep = write_sweep(root / "written", steps=4, repeats=1, edit=unbegun)
        self.plan = read_plan(self.sweep)
        (bundle,) = self.plan.bundles
        self.run_id = bundle.run_ids[0]
        order = BundleOrder(bundle.bundle_id, "w", ((self.run_id, 1),), Limits(), 0, (), step=Step(1, 1, 1, "python"))
        write_json(self.sweep.bundle(bundle.bundle_id).order, order)
        write_submission(self.sweep, Submission("t", "token", (bundle.bundle_id,), time.time(), "host", "12"))
        self.scene: list[Callable[[], object]] = []
        self.said: list[str] = []
        self.seen: list[str] = []
        self.tended: list[str] = []

    def _sleep(self, seconds: float) -> None:
        assert self.scene, f"it waits for more than there is: {self.seen} {self.said}"
        self.scene.pop(0)()

    def squeue(self, script: str) -> None:
        (self.root / "squeue").write_text(f"#!/bin/sh\n{script}\n")
        (self.root / "squeue").chmod(0o755)

    def job(self, state: str, reason: str = "None", ids: str = "12") -> None:
        self.squeue(f's=${{5#--format=%V}}; s=${{s%%\\%*}}; for job in {ids}; do '
                    f'echo "17@$job@{state}@{reason}@N/A@node1@token" | sed "s/@/$s/g"; done')  # fmt: skip

    def begin(self) -> None:
        self.sweep.run(self.run_id).attempt(1).logs.mkdir(parents=True)

    def end(self, name: OutcomeName) -> None:
        outcome = Outcome(name, "measure", "a", 1.0, time.time())
        attempt = self.sweep.run(self.run_id).attempt(1)
        write_json(attempt.outcome, outcome_to_json(attempt, outcome))

    # --- a view ---

    def update(self, states: Mapping[str, RunState]) -> None:
        self.seen.append(states[self.run_id].name)

    def print(self, line: str) -> None:
        self.said.append(line)

    def follow(self, *scene: Callable[[], object], submits: Sequence[Callable[[], bool]] = ()) -> str:
        """Follow the sweep. ``submits`` has what each retry does, in order. Further retries do nothing."""
        left = list(submits)

        def tend(states: Mapping[str, RunState]) -> bool:
            self.tended.append(states[self.run_id].name)
            return left.pop(0)() if left else False

        self.scene = list(scene)
        states = watch_slurm.watch_slurm(
            self.sweep, self.plan, self, JobMonitor(), watch_slurm.PendingTimeout(None), tend
        )
        assert not self.scene
        return states[self.run_id].name


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_watching_ends_with_the_last_run_even_if_its_job_goes_on(watched: Watched) -> None:
    watched.job("RUNNING")
    assert watched.follow(watched.begin, lambda: watched.end("COMPLETED")) == "COMPLETED"
    assert watched.seen == ["QUEUED", "RUNNING", "COMPLETED"] and watched.said == []


def test_a_lost_run_is_retried_once_its_job_has_ended(watched: Watched) -> None:
    watched.job("RUNNING")
    watched.begin()
    ended = watched.follow(lambda: watched.end("NODE_FAIL"), lambda: watched.job("NODE_FAIL"))
    assert ended == "NODE_FAIL" and watched.tended[-1] == "NODE_FAIL"


def test_a_missing_outcome_is_written_before_the_retry(watched: Watched) -> None:
    watched.job("RUNNING")
    watched.begin()
    outcome = watched.sweep.run(watched.run_id).attempt(1).outcome
    assert watched.follow(lambda: watched.job("TIMEOUT")) == "TIMEOUT"
    assert outcome.exists() and watched.seen[-1] == "TIMEOUT"


def test_watching_goes_on_after_a_retry_was_submitted(watched: Watched) -> None:
    watched.job("NODE_FAIL")
    watched.begin()
    assert watched.follow(lambda: None, submits=[lambda: True]) == "NODE_FAIL"
    assert watched.tended == ["NODE_FAIL"] * 2


def test_a_retry_that_cannot_be_submitted_waits_for_slurm(watched: Watched) -> None:
    watched.job("NODE_FAIL")
    watched.begin()

    def falls_silent() -> bool:
        watched.squeue(SILENT)
        return False

    scene = [lambda: None, lambda: None, lambda: watched.job("NODE_FAIL")]
    assert watched.follow(*scene, submits=[falls_silent]) == "NODE_FAIL"
    assert watched.tended == ["NODE_FAIL"] * 4


def test_watching_waits_for_an_unknown_job_while_slurm_does_not_answer(watched: Watched) -> None:
    watched.squeue(SILENT)
    watched.begin()
    assert watched.follow(lambda: None, lambda: None, lambda: watched.job("NODE_FAIL")) == "NODE_FAIL"
    (line,) = watched.said
    assert line.startswith("squeue has not answered since") and line.endswith("states are as last known")


def test_a_run_that_is_given_up_ends_as_environment(watched: Watched) -> None:
    for job_id in ("10", "11"):
        bundles = (watched.plan.bundles[0].bundle_id,)
        write_submission(watched.sweep, Submission(job_id, "token", bundles, time.time(), "host", job_id))
    watched.job("FAILED", ids="10 11 12")
    assert watched.follow() == "ENVIRONMENT"
    assert watched.seen == ["PLANNED", "ENVIRONMENT"]


def test_a_blocked_job_is_printed_once_and_again_after_it_was_free(watched: Watched) -> None:
    watched.job("PENDING", "JobHeldUser")
    held, free = (lambda: watched.job("PENDING", "JobHeldUser")), (lambda: watched.job("PENDING", "Priority"))
    watched.follow(held, held, free, held, lambda: watched.job("CANCELLED"))
    assert len(watched.said) == 2 and len(set(watched.said)) == 1
    assert watched.said[0].endswith("its user holds it (JobHeldUser). Fix: scontrol release 12")
    assert watched.seen[-1] == "CANCELLED"
