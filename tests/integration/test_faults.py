"""Kill any process at any time. Test that no finished run is lost, no run is made twice, nothing keeps running, and the
outcome says what happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from typing import Any

import pytest

from launch.common.file_lock import was_killed
from launch.contract.paths import AttemptPaths
from tests.integration.host import Host, rank_pid, recipe, wait_until
from tests.records import read_metrics

MINUTE = 1.0
"""Minutes of a limit. A run on a busy machine reaches its first step within this limit. On a free machine that takes
three seconds."""


def test_a_command_that_goes_away_leaves_its_sweep_to_the_next_one(host: Host) -> None:
    """Press Ctrl-C, then kill -9 the command and the queue, while the first of two runs continues."""
    with host.held():
        first, run_ids = host.begin(recipe("mini", repeats=2))
        path, attempt = str(host.folder / "mini.yaml"), host.wait_for_step("mini", run_ids[0])
        first.send_signal(signal.SIGINT)
        out, err = first.communicate(timeout=120)
        assert first.returncode == 130
        assert "keeps running without this command" in out and "status mini --watch" in out and "cancel mini" in out
        assert "Traceback" not in err

        second = host.start("sweep", path)
        assert second.stdout is not None
        assert any("2 already running or waiting, adopted" in second.stdout.readline() for _ in range(2))
        second.kill()
        second.communicate()
        os.kill(host.process("orchestrator.submit.local_queue"), signal.SIGKILL)
        wait_until(lambda: was_killed(host.sweep("mini").queue_lock), 60, "the queue's end")
        assert rank_pid(attempt) in host.processes()

    done = host.run("sweep", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert host.states("mini") == dict.fromkeys(run_ids, "COMPLETED")
    assert host.attempts("mini") == {run_id: [1] for run_id in run_ids}
    host.wait_for_nobody()


def test_a_queued_run_says_who_holds_its_slot(host: Host) -> None:
    """The slot belongs to a run of a store that this store does not know."""
    (holding,) = host.begin_unwatched(recipe("first", steps=10**6))
    host.wait_for_step("first", holding)
    holder = host.sweep("first").root
    host.store = host.folder / "another"
    host.begin_unwatched(recipe("second"))
    assert list(host.states("second").values()) == ["QUEUED"]
    answer = json.loads(host.run("status", "second", "--json").stdout)["slots_held_by_others"]
    assert [(held["slot"], held["sweep"], held["run_id"]) for held in answer] == [("cpu", str(holder), holding)]
    said = rf"queued runs wait for slot cpu of this host: {holder} uses it \(process \d+, since \d+-.*\)"
    assert re.search(said, host.run("status", "second").stdout)


def test_a_supervisor_that_dies_takes_its_ranks_along_and_the_queue_goes_on(host: Host) -> None:
    """Its tracker ends too. Neither of them leaves anything."""
    with host.held():
        sweep, (killed, later) = host.begin(recipe("mini", repeats=2, wandb={"mode": "offline"}))
        attempt = host.wait_for_step("mini", killed)
        os.kill(host.supervisor("mini"), signal.SIGKILL)
        wait_until(lambda: rank_pid(attempt) not in host.processes(), 60, "the rank to die with its supervisor")
    out, _ = sweep.communicate(timeout=300)
    assert host.states("mini") == {killed: "INTERRUPTED", later: "COMPLETED"}, out
    assert host.attempts("mini") == {killed: [1], later: [1]}
    assert sweep.returncode == 2
    host.wait_for_nobody()


def test_one_resume_is_enough_while_another_supervisor_goes_on_with_the_bundle(host: Host) -> None:
    with host.held():
        killed, later = host.begin_unwatched(recipe("mini", repeats=2))
        host.wait_for_step("mini", killed)
        os.kill(host.supervisor("mini"), signal.SIGKILL)
        host.wait_for_step("mini", later)
        assert host.states("mini") == {killed: "INTERRUPTED", later: "RUNNING"}
        resumed = host.start("resume", "mini")
        assert resumed.stdout is not None
        said = "1 run to start; 1 already running or waiting, adopted"
        assert any(said in resumed.stdout.readline() for _ in range(2))
    resumed.communicate(timeout=300)
    assert host.states("mini") == {killed: "COMPLETED", later: "COMPLETED"}
    assert host.attempts("mini") == {killed: [1, 2], later: [1]}
    allocations = {host.outcome("mini", run).allocation.rpartition(".")[2] for run in (killed, later)}
    assert allocations == {"2"}, "one supervisor ran both"
    host.wait_for_nobody()


def test_a_dead_rank_ends_its_run_and_no_other(host: Host) -> None:
    with host.held():
        sweep, (faulted, whole) = host.begin(recipe("mini", repeats=2))
        crashed = host.wait_for_step("mini", faulted)
        os.kill(rank_pid(crashed), signal.SIGSEGV)
    out, _ = sweep.communicate(timeout=300)

    outcome = host.outcome("mini", faulted)
    assert (outcome.outcome, outcome.failure_class, outcome.rank, outcome.phase) == ("FAILED", "SIGSEGV", 0, "measure")
    assert host.outcome("mini", whole).outcome == "COMPLETED"
    assert "Fatal Python error: Segmentation fault" in crashed.log(0).read_text()
    assert sweep.returncode == 3, out
    assert "Segmentation fault" in host.run("logs", faulted).stdout
    host.wait_for_nobody()


def test_a_run_that_hangs_and_one_that_takes_too_long_are_ended(host: Host, another_host: Host) -> None:
    """Both runs start at once, since each waits for a minute."""
    stuck, hung = _begin_and_stop(host, recipe("stuck", resources={"hang_minutes": MINUTE}))
    slow, late = _begin_and_stop(another_host, recipe("slow", resources={"minutes_per_run": MINUTE}))
    for sweep in (stuck, slow):
        sweep.communicate(timeout=300)
        assert sweep.returncode == 3
    for one in (host, another_host):
        one.wait_for_nobody()

    outcome = host.outcome("stuck", host.run_ids("stuck")[0])
    assert (outcome.outcome, outcome.phase, outcome.message) == ("HANG", "measure", "no sign of life for 60 s")
    assert "launch/train/loop.py" in hung.log(0).read_text(), "a stack of the rank that hung"
    outcome = another_host.outcome("slow", another_host.run_ids("slow")[0])
    assert (outcome.outcome, outcome.message) == ("TIMEOUT", "not finished after 60 s")
    assert len(list(read_metrics(late))) > 0


def _begin_and_stop(host: Host, content: dict[str, Any]) -> tuple[subprocess.Popen[str], AttemptPaths]:
    """Start a sweep of one run, and stop its rank once it trains."""
    with host.held():
        sweep, (run_id,) = host.begin(content)
        attempt = host.wait_for_step(content["name"], run_id)
        os.kill(rank_pid(attempt), signal.SIGSTOP)
    return sweep, attempt


def test_numbers_that_are_not_finite_end_a_run_and_may_be_expected(host: Host) -> None:
    content = recipe("diverges", training={"learning_rate": 1e30})
    unexpected = host.run("sweep", host.write(content))
    (run_id,) = host.run_ids("diverges")
    outcome = host.outcome("diverges", run_id)
    assert outcome.outcome == "NUMERIC" and "at step " in outcome.message and outcome.rank == 0
    assert unexpected.returncode == 3
    last = list(read_metrics(host.sweep("diverges").run(run_id).attempt(1)))[-1]
    assert f"at step {last.step} " in outcome.message, "the step that was not finite is on disk"

    expected = host.run("sweep", host.write(content | {"expect": {"outcome": "NUMERIC"}}))
    assert expected.returncode == 0, expected.stdout
    assert host.attempts("diverges") == {run_id: [1]}


def test_cancel_ends_everything_and_another_sweep_never_ran_beside_it(host: Host) -> None:
    """Two sweeps are started on one host without waiting. The second one gets the slot when the first is cancelled."""
    with host.held():
        running, waiting = host.begin_unwatched(recipe("one", repeats=2))
        (other,) = host.begin_unwatched(recipe("two"))
        host.wait_for_step("one", running)
        assert host.states("one") == {running: "RUNNING", waiting: "QUEUED"}
        assert set(host.states("two").values()) == {"QUEUED"}
        cancelled = json.loads(host.run("cancel", "one", "--json").stdout)
    assert set(cancelled["cancelled"]) == {running, waiting}
    assert host.states("one") == {running: "CANCELLED", waiting: "CANCELLED"}
    assert "nothing to cancel: no run of one runs or waits" in host.run("cancel", "one").stdout

    second_attempt = host.sweep("two").run(other).attempt(1)
    wait_until(second_attempt.outcome.exists, 300, "the second sweep to end by itself")
    assert host.states("two") == {other: "COMPLETED"}
    ended = host.outcome("one", running).ended
    assert host.outcome("two", other).started >= ended
    host.wait_for_nobody()

    resumed = host.run("resume", "one", "--executor", "debug")
    assert resumed.returncode == 0, resumed.stdout
    assert host.attempts("one") == {running: [1, 2], waiting: [1, 2]}
    assert host.states("one") == {running: "COMPLETED", waiting: "COMPLETED"}


def test_chosen_runs_are_cancelled_and_the_others_go_on(host: Host) -> None:
    """The test cancels the run of the running bundle that has not begun, then all runs of a waiting bundle, then the
    current run."""
    content = recipe("some", steps=10**6, repeats=2, sweep={"grid": {"training.seed": [1, 2]}})
    running, behind, *waiting = host.begin_unwatched(content)
    host.wait_for_step("some", running)
    assert host.run("cancel", "some", "eager").returncode == 1, "which of four"
    assert json.loads(host.run("cancel", "some", behind, *waiting, "--json").stdout)["cancelled"] == sorted(
        [behind, *waiting]
    )
    assert host.states("some") == {running: "RUNNING"} | dict.fromkeys([behind, *waiting], "CANCELLED")
    assert host.run("cancel", "some", running).returncode == 0
    host.wait_for_nobody()
    for run, message in {running: "while it ran", **dict.fromkeys([behind, *waiting], "before it began")}.items():
        assert host.outcome("some", run).message == f"cancelled {message}"


def test_cancel_says_at_once_that_a_stopped_supervisor_keeps_it_waiting(host: Host) -> None:
    (run,) = host.begin_unwatched(recipe("stopped", steps=10**6))
    host.wait_for_step("stopped", run)
    supervisor = host.supervisor("stopped")
    os.kill(supervisor, signal.SIGSTOP)
    cancelling = host.start("cancel", "stopped")
    assert cancelling.stderr is not None
    line = cancelling.stderr.readline()
    os.kill(supervisor, signal.SIGCONT)
    out, err = cancelling.communicate(timeout=120)
    assert f"{run} (supervised by process {supervisor} on " in line, err
    assert f"which is stopped: kill -CONT {supervisor} lets it react" in line
    assert cancelling.returncode == 0 and "cancelled 1 run" in out, err


def test_a_supervisor_that_cannot_begin_is_not_started_for_ever(host: Host) -> None:
    path = host.write(recipe("mini"))
    (bundle,) = json.loads(host.run("plan", path, "--json").stdout)["bundles"]
    paths = host.sweep("mini").bundle(bundle["bundle_id"])
    # A folder at this place keeps supervisors from writing their record.
    paths.allocations.mkdir(parents=True)
    ended = host.run("sweep", path, seconds=600)
    assert ended.returncode == 2
    assert "never began" in ended.stdout
    assert len(re.findall(r"^[\w.]+Error: .*allocations\.jsonl", paths.log.read_text(), re.MULTILINE)) == 3
    assert set(host.states("mini").values()) == {"PLANNED"}
    host.wait_for_nobody()


def test_a_damaged_spec_costs_one_run(host: Host) -> None:
    with host.held():
        whole, damaged = host.begin_unwatched(recipe("mini", repeats=2))
        host.sweep("mini").run(damaged).spec.write_text('{"model":')
    host.wait_for_nobody()
    assert host.states("mini") == {whole: "COMPLETED", damaged: "CONFIG"}
    outcome = host.outcome("mini", damaged)
    assert outcome.message.startswith("spec.json cannot be read") and "--failed" in outcome.remedy

    host.sweep("mini").run(damaged).spec.unlink()
    assert host.run("sweep", str(host.folder / "mini.yaml")).returncode == 3, "the failure is not made good unasked"
    assert host.run("resume", "mini", "--failed").returncode == 0
    assert host.attempts("mini") == {whole: [1], damaged: [1, 2]}


@pytest.mark.usefixtures("finished")  # The test uses the compiled code of this sweep.
def test_resume_makes_an_interrupted_run_again_beside_its_eager_twin(host: Host) -> None:
    eager, graphed = host.begin_unwatched(recipe("pair", graphed=True))
    wait_until(host.sweep("pair").run(eager).attempt(1).outcome.exists, 300, "the eager run to end")
    with host.held():
        attempt = host.wait_for_step("pair", graphed)
        kept = host.sweep("pair").run(eager).attempt(1).metrics.read_bytes()
        os.kill(host.supervisor("pair"), signal.SIGKILL)
    host.wait_for_nobody()
    assert not attempt.outcome.exists()
    assert host.states("pair") == {eager: "COMPLETED", graphed: "INTERRUPTED"}

    again = host.run("sweep", str(host.folder / "pair.yaml"))
    assert "to start" not in again.stdout and "resume pair" in again.stdout
    assert host.attempts("pair") == {eager: [1], graphed: [1]}

    resumed = host.run("resume", "pair")
    assert host.states("pair") == {eager: "COMPLETED", graphed: "COMPLETED"}, resumed.stdout
    assert host.attempts("pair") == {eager: [1, 2], graphed: [1, 2]}
    assert host.outcome("pair", eager).allocation == host.outcome("pair", graphed).allocation
    assert host.sweep("pair").run(eager).attempt(1).metrics.read_bytes() == kept


def test_a_sweep_that_runs_is_not_planned_anew(host: Host) -> None:
    """Two plans of one name at the same time would judge each other's runs, and make them twice."""
    (run_id,) = host.begin_unwatched(recipe("mini", steps=10**6, repeats=1))
    host.wait_for_step("mini", run_id)
    other = host.run("sweep", host.write(recipe("mini", steps=10**6, repeats=3)))
    assert other.returncode == 1 and "is already running with another plan" in other.stderr
    assert host.run("cancel", "mini").returncode == 0
    host.wait_for_nobody()
    assert host.attempts("mini") == {run_id: [1]}
    assert host.states("mini") == {run_id: "CANCELLED"}
