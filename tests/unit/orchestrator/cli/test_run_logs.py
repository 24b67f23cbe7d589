"""Test choosing and following the log of a run, with attempts written by hand."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from launch.common.atomic_files import JsonLines, read_json, write_json
from launch.common.file_lock import Lock
from launch.contract.bundle import BundleOrder
from launch.contract.outcomes import Outcome, outcome_to_json
from launch.contract.paths import AttemptPaths, RunPaths
from launch.contract.plan import Limits, read_plan
from launch.supervise.pack_attempt import pack_if_completed
from orchestrator.cli import follow_log as follow_log_module
from orchestrator.cli.follow_log import follow_log
from orchestrator.cli.run_logs import read_log
from orchestrator.errors import InputError
from orchestrator.sweeps.submissions import Submission, write_submission
from tests.records import unbegun, write_sweep


class Run:
    """An eager run that is ordered but has not begun."""

    def __init__(self, root: Path) -> None:
        self.sweep = write_sweep(root / "written", steps=4, edit=unbegun)
        self.plan = read_plan(self.sweep)
        (planned,) = self.plan.bundles
        self.run_id = planned.run_ids[0]
        self.paths = RunPaths(self.sweep.run(self.run_id).root)
        self.bundle = self.sweep.bundle(planned.bundle_id)
        order = BundleOrder(planned.bundle_id, "workload", ((self.run_id, 1),), Limits(), 1, ("cpu",))
        write_json(self.bundle.order, order)

    def begin(self, number: int = 1, **texts: str) -> AttemptPaths:
        """Begin an attempt with the logs ``texts``: of rank 0 as ``rank0``, of the launcher as ``launcher``."""
        attempt = self.paths.attempt(number)
        attempt.logs.mkdir(parents=True)
        for name, text in texts.items():
            (attempt.logs / f"{name}.log").write_text(text)
        return attempt

    def shown(self, number: int | None = None, rank: int | None = None) -> str:
        return "".join(read_log(self.paths, self.plan, number, rank))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def completes(attempt: AttemptPaths, ranks: int) -> None:
    for rank in range(ranks):
        with JsonLines(attempt.events(rank)) as lines:
            lines.write({"kind": "enter", "phase": "init"})
    write_json(attempt.outcome, outcome_to_json(attempt, Outcome("COMPLETED", "teardown", "a", 1.0, 2.0)))
    pack_if_completed(attempt, ranks)


def ends(attempt: AttemptPaths, rank: int | None = None) -> None:
    outcome = Outcome("FAILED", "measure", "a", 1.0, 2.0, rank, "EXIT", "exit code 3")
    write_json(attempt.outcome, outcome_to_json(attempt, outcome))


def test_read_log_chooses_the_log(run: Run) -> None:
    with pytest.raises(InputError, match=f"run {run.run_id} has not begun"):
        run.shown()
    attempt = run.begin(rank0="zero\n", rank1="one\n", launcher="launcher\n")
    assert run.shown() == f"# {run.run_id}, attempt 1, rank0.log\nzero\n"
    assert run.shown(rank=1).endswith("rank1.log\none\n")
    ends(attempt, rank=1)
    assert run.shown().endswith("rank1.log\none\n")
    with pytest.raises(InputError, match="rank 2 left no log\n    logs: rank0, rank1"):
        run.shown(rank=2)
    with pytest.raises(InputError, match="has no attempt 2\n    attempts: 1"):
        run.shown(2)
    run.begin(2, launcher="nothing of it began\n")
    assert run.shown() == f"# {run.run_id}, attempt 2, launcher.log\nnothing of it began\n"
    assert run.shown(1).endswith("one\n")


def test_if_no_rank_printed_anything_the_launcher_or_the_supervisor_did(run: Run) -> None:
    run.bundle.log.write_text("supervisor\n")
    own = f"# {run.run_id} left no log; this is supervisor.log of its bundle\nsupervisor\n"
    assert run.shown() == own, "it never began"
    attempt = run.begin(rank0="\n", launcher="srun: error\n")
    assert run.shown() == f"# {run.run_id}, attempt 1, launcher.log\nsrun: error\n"
    attempt.launcher_log.write_text("")
    assert run.shown() == f"# {run.run_id}, attempt 1, rank0.log\n\n", "it may still print"
    ends(attempt)
    assert run.shown() == f"# {run.run_id}, attempt 1, rank0.log\n\n{own}"
    assert run.shown(rank=0) == f"# {run.run_id}, attempt 1, rank0.log\n\n"
    run.bundle.log.write_text("")
    assert run.shown() == f"# {run.run_id}, attempt 1, rank0.log\n\n"


def test_ranks_of_one_torchrun_share_its_log(run: Run) -> None:
    launched = {
        "engine": "command",
        "command": {"launcher": "torchrun"},
        "placement": {"nodes": 2, "ranks_per_node": 2},
    }
    write_json(run.paths.spec, read_json(run.paths.spec) | launched)
    attempt = run.begin(rank0="node1\n", rank2="node2\n", launcher="srun\n")
    first, second = (
        f"# {run.run_id}, attempt 1, rank{ranks[0]}.log, of the torchrun that started ranks {ranks}\n{node}\n"
        for ranks, node in (("0 to 1", "node1"), ("2 to 3", "node2"))
    )
    assert [run.shown(rank=rank) for rank in range(4)] == [first, first, second, second]
    ends(attempt, rank=3)
    assert run.shown() == second
    with pytest.raises(InputError, match="rank 4 left no log\n    logs: rank0, rank2"):
        run.shown(rank=4)


def test_the_steps_go_before_the_log(run: Run) -> None:
    attempt = run.begin(rank0="traceback\n", rank1="one\n")
    row = {"step": 7, "loss": 2.5, "grad_norm": "NaN", "step_time_ms": 12.345, "tokens": 8, "phase": "measure"}
    attempt.metrics.write_text(f'{json.dumps(row)}\n{{"step": 8}}\n{{"step": 9, "lo')
    expected = ["step 7 loss 2.5 grad norm nan 12.35 ms measure", "# a line of metrics.jsonl that cannot be read"]
    for shown in (run.shown(), "".join(follow_log(run.paths, run.plan, None, None))):
        heading, *steps, log = shown.splitlines()
        assert (
            heading.startswith("# ") and [" ".join(line.split()) for line in steps] == expected and log == "traceback"
        )
    assert "step" not in run.shown(rank=1)


def test_the_logs_of_a_completed_attempt_are_packed(run: Run) -> None:
    attempt = run.begin(rank0="", rank1="grün\n", launcher="")
    completes(attempt, 2)
    assert not attempt.logs.exists()
    assert run.shown() == f"# {run.run_id}, attempt 1, rank0.log\n"
    assert run.shown(rank=1) == f"# {run.run_id}, attempt 1, rank1.log\ngrün\n"
    with pytest.raises(InputError, match="rank 2 left no log\n    logs: rank0, rank1"):
        run.shown(rank=2)


def test_following_reads_a_log_that_was_packed_after_it_was_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_log_module, "POLL_SECONDS", 0.0)
    attempt = run.begin(rank0="all\n")
    lock = Lock.try_acquire(run.bundle.lock)
    assert lock is not None
    following = follow_log(run.paths, run.plan, None, None)
    assert next(following) == f"# {run.run_id}, attempt 1, rank0.log\n"
    completes(attempt, 1)
    assert "".join(following) == "all\n# ended as COMPLETED\n"
    lock.release()


def test_a_run_that_never_began_has_the_log_of_its_job(run: Run) -> None:
    submission = Submission("token", "token", ("other", run.bundle.root.name), 1.0, "host", "12")
    write_submission(run.sweep, submission)
    folder = submission.folder(run.sweep)
    folder.mkdir(parents=True)
    for name, text in {
        "12_1_0_log.out": "",
        "12_1_0_log.err": "no such module\n",
        "12_0_0_log.err": "another's",
    }.items():
        (folder / name).write_text(text)
    expected = f"# {run.run_id} left no log; this is 12_1_0_log.err of its job\nno such module\n"
    assert run.shown() == expected
    run.begin()
    assert run.shown() == expected, "an attempt that nobody began"


def test_following_starts_before_the_attempt_and_stops_at_its_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_log_module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(follow_log_module, "STATE_SECONDS", 0.02)
    lock = Lock.try_acquire(run.bundle.lock)
    assert lock is not None
    printed: list[str] = []
    following = threading.Thread(target=lambda: printed.extend(follow_log(run.paths, run.plan, None, None)))
    following.start()

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in "".join(printed):
            assert time.monotonic() < deadline, printed
            time.sleep(0.01)

    wait_for(f"# attempt 1 of {run.run_id} has not begun: waiting for its turn\n")
    attempt = run.begin(launcher="not this one\n")
    (attempt.logs / "rank0.log").write_bytes("first\ngrö".encode()[:-1])
    wait_for(f"# {run.run_id}, attempt 1, rank0.log\nfirst\ngr")
    with open(attempt.log(0), "ab") as log:
        log.write("ö\nlast\n".encode()[1:])
    wait_for("grö\nlast\n")
    with JsonLines(attempt.metrics) as lines:
        lines.write({"step": 0, "loss": 1.5, "grad_norm": 2.0, "step_time_ms": 3.0, "phase": "warmup"})
        wait_for("loss 1.5 ")
    (attempt.logs / "rank1.log").write_text("")
    ends(attempt, rank=1)
    following.join(60)
    assert not following.is_alive()
    text = "".join(printed)
    assert text.endswith(
        f"warmup\n# ended as FAILED: exit code 3\n# another rank failed first: logs {run.run_id} prints its log\n"
    )
    assert text.count("has not begun") == 1
    lock.release()


@pytest.mark.parametrize("number", [None, 1])
def test_following_an_attempt_that_ended_reads_its_log(run: Run, number: int | None) -> None:
    ends(run.begin(rank0="zero\n"))
    assert "".join(follow_log(run.paths, run.plan, number, None)) == run.shown()


def test_following_a_run_that_cannot_begin_is_an_error(run: Run) -> None:
    with pytest.raises(InputError, match="has not begun"):
        list(follow_log(run.paths, run.plan, None, None))
