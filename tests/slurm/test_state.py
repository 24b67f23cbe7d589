"""Test that states of runs are right while parts of Slurm are down, and when jobs end unexpectedly."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import Any

import pytest

from tests.integration.host import rank_pid, recipe, wait_until
from tests.slurm.site import Site

pytestmark = pytest.mark.slurm

LONG = 10**6
"""The steps of a run that a test must end."""
FORGETFUL = 'for word; do shift; test "$word" = --states=all || set -- "$@" "$word"; done; exec $REAL "$@"'
"""A squeue that does not list ended jobs, as with a short MinJobAge."""


def status(site: Site, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(site.run("status", name, "--json").stdout)["runs"]
    return rows


def waiting(site: Site, name: str) -> str:
    """Return the job of the sweep's only bundle, once Slurm has seen it and makes it wait."""

    def waits() -> bool:
        # A submission is written before Slurm knows its job.
        job = status(site, name)[0]["job"]
        return job is not None and job["reason"] in ("Resources", "Priority")

    wait_until(waits, 60, "a waiting job")
    return str(status(site, name)[0]["job"]["job_id"])


def test_a_job_that_waits_says_why_and_until_when_and_what_would_let_it_go(site: Site) -> None:
    with site.full():
        assert site.run("sweep", site.write(recipe("waits", steps=40)), "--no-wait").returncode == 0
        job = waiting(site, "waits")
        wait_until(lambda: status(site, "waits")[0]["job"]["expected_start"] is not None, 60, "Slurm's forecast")
        (row,) = status(site, "waits")
        assert row["state"] == "QUEUED" and row["job"]["state"] == "PENDING" and row["job"]["nodes"] == ""
        assert 0 < row["job"]["expected_start"] - time.time() < 310
        said = site.run("status", "waits").stdout
        assert f"job {job} PENDING (Resources), expected to start at " in said and "Fix:" not in said

        site.cluster.run("scontrol", "uhold", job)
        fix = f"job {job} (1 run) cannot start: its user holds it (JobHeldUser). Fix: scontrol release {job}"
        assert fix in site.run("status", "waits").stdout
        watching = site.start("status", "waits", "--watch")
        assert watching.stdout is not None and fix in [watching.stdout.readline().strip() for _ in range(1)]
        site.cluster.run("scontrol", "release", job)
    out, _ = watching.communicate(timeout=300)
    assert watching.returncode == 0 and "COMPLETED" in out and out.count("Fix:") == 0


def test_a_waiting_job_that_an_operator_cancels_is_not_begun_again_unasked(site: Site) -> None:
    path = site.write(recipe("scancelled", steps=40))
    with site.full():
        watching = site.start("sweep", path)
        wait_until(lambda: site.sweep("scancelled").submissions.exists(), 60, "a submission")
        job = waiting(site, "scancelled")
        site.cluster.run("scancel", job)
        out, _ = watching.communicate(timeout=300)
        assert watching.returncode == 3 and "ended CANCELLED, expected COMPLETED: cancelled before it began" in out, out
        (row,) = status(site, "scancelled")
        assert row["state"] == "CANCELLED"
        assert "to start" not in site.run("sweep", path).stdout
    assert site.run("resume", "scancelled").returncode == 0
    assert [row["state"] for row in status(site, "scancelled")] == ["COMPLETED"]


def test_a_job_that_waits_for_too_long_is_taken_out_of_the_queue(site: Site) -> None:
    site.profile(max_pending_minutes=0.05)
    with site.full():
        done = site.run("sweep", site.write(recipe("patience", steps=40)))
        assert "is cancelled: it waited longer than max_pending_minutes, 0.05 min" in done.stdout
        (row,) = status(site, "patience")
        outcome = site.outcome("patience", row["run_id"])
        assert outcome.outcome == row["state"] == "CANCELLED" and outcome.message.endswith("(Resources)")
        assert len(site.queue()) == 1, "the other job"
    assert site.run("resume", "patience").returncode == 0


def test_while_the_controller_is_away_runs_go_on_and_states_stay(site: Site) -> None:
    """The controller is stopped after one run has begun, while another waits. It is started after the command has
    reported its silence."""
    site.profile(max_jobs=1)
    content = recipe("headless", sweep={"points": [{"training.steps": 60}, {"training.steps": 40}]})
    with site.held():
        watching, (running, waits) = site.begin(content)
        rank = rank_pid(site.wait_for_step("headless", running))
        os.kill(rank, signal.SIGSTOP)  # Keep the run from ending before the command has printed everything.
    site.cluster.stop("slurmctld")
    try:
        asking = site.start("status", "headless")
        assert watching.stdout is not None
        assert any("squeue has not answered since" in line for line in iter(watching.stdout.readline, ""))
        said, _ = asking.communicate(timeout=300)
        assert "squeue has not answered since" in said and "states are as last known" in said
        assert re.search(rf"{running} +RUNNING", said) and re.search(rf"{waits} +QUEUED", said)
    finally:
        os.kill(rank, signal.SIGCONT)
        site.cluster.start("slurmctld")
    out, _ = watching.communicate(timeout=300)
    assert watching.returncode == 0, out
    assert site.attempts("headless") == {running: [1], waits: [1]}
    site.wait_for_nobody()


def orphaned(site: Site, name: str) -> str:
    """Return the only run of a sweep that nobody watches, and whose supervisor is killed."""
    assert site.run("sweep", site.write(recipe(name, steps=LONG)), "--no-wait").returncode == 0
    (run_id,) = site.states(name)
    site.wait_for_step(name, run_id)
    os.kill(site.supervisor(name), signal.SIGKILL)
    return run_id


def test_a_supervisor_that_is_killed_is_a_result_and_what_it_had_not_begun_is_made(site: Site) -> None:
    with site.held():
        watching, (killed, left) = site.begin(recipe("killed", repeats=2))
        site.wait_for_step("killed", killed)
        os.kill(site.supervisor("killed"), signal.SIGKILL)
    out, _ = watching.communicate(timeout=300)
    assert watching.returncode == 3, out
    assert site.attempts("killed") == {killed: [1], left: [1]}
    outcome = site.outcome("killed", killed)
    assert (outcome.outcome, outcome.failure_class, outcome.phase) == ("FAILED", "SUPERVISOR", "measure")
    assert outcome.allocation.endswith(".1") and site.outcome("killed", left).allocation.endswith(".2")
    assert f"FAILED     {killed}" in out and f"COMPLETED  {left}" in out
    assert sorted(site.accounts("State").values()) == ["COMPLETED", "FAILED"]
    site.wait_for_nobody()


def test_accounts_that_are_away_delay_an_ending_and_change_none(site: Site) -> None:
    """squeue no longer lists the job, and sacct does not answer. Once it answers again, the end of the job is known."""
    site.program("squeue", FORGETFUL)
    killed = orphaned(site, "unaccounted")
    wait_until(lambda: not site.queue(), 60, "the job to leave the queue")
    site.cluster.stop("slurmdbd")
    try:
        said = site.run("status", "unaccounted").stdout
        assert re.search(rf"{killed} +RUNNING", said)
        assert "sacct has not answered since" in said and "not in squeue" in said
    finally:
        site.cluster.start("slurmdbd")
    wait_until(lambda: site.states("unaccounted")[killed] == "FAILED", 60, "sacct's answer")
    assert not site.sweep("unaccounted").run(killed).attempt(1).outcome.exists(), "looking changes nothing"
    site.run("report", "unaccounted")
    assert site.outcome("unaccounted", killed).failure_class == "SUPERVISOR"


def test_without_accounts_states_are_right(site: Site) -> None:
    """squeue lists running and waiting jobs only."""
    site.program("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    site.program("squeue", FORGETFUL)
    done = site.run("sweep", site.write(recipe("plain", steps=40)))
    assert done.returncode == 0, done.stdout
    gone = orphaned(site, "gone")
    wait_until(lambda: site.states("gone")[gone] == "ENVIRONMENT", 60, "its job to be gone", site.queue)
    assert "Slurm keeps no accounting here" in site.run("status", "gone").stdout
    site.run("report", "gone")
    assert site.outcome("gone", gone).failure_class == "JOB_GONE"
    assert site.run("resume", "gone", "--no-wait").returncode == 0
    assert site.states("gone")[gone] in ("QUEUED", "RUNNING")


def test_a_node_that_fails_ends_what_ran_on_it(site: Site) -> None:
    assert site.run("sweep", site.write(recipe("node", steps=LONG)), "--no-wait").returncode == 0
    (run_id,) = site.states("node")
    site.wait_for_step("node", run_id)
    wait_until(lambda: bool(status(site, "node")[0]["job"]["nodes"]), 60, "a node")
    node = status(site, "node")[0]["job"]["nodes"]
    assert f"job {status(site, 'node')[0]['job']['job_id']} on {node}" in site.run("status", "node").stdout
    site.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        wait_until(lambda: site.states("node")[run_id] == "NODE_FAIL", 60, "the job to end", site.queue)
        site.run("report", "node")
        outcome = site.outcome("node", run_id)
        assert (outcome.outcome, outcome.phase, outcome.node) == ("NODE_FAIL", "measure", node)
    finally:
        site.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    site.wait_for_nobody()


def test_a_job_that_cannot_begin_anything_is_given_up_and_shows_its_own_log(site: Site) -> None:
    site.profile(setup=["echo the module system is away >&2; exit 7"])
    done = site.run("sweep", site.write(recipe("broken", steps=40)))
    assert done.returncode == 3, done.stdout
    (run_id,) = site.states("broken")
    outcome = site.outcome("broken", run_id)
    assert (outcome.outcome, outcome.failure_class, outcome.phase) == ("ENVIRONMENT", "LAUNCH", "init")
    assert outcome.message.startswith("3 jobs in a row ended before any run began; the last, ")
    assert outcome.message.endswith(", as FAILED")
    assert len(site.accounts("State")) == 3
    assert "the module system is away" in site.run("logs", run_id).stdout


def test_a_log_is_followed_from_before_its_run_begins_to_its_end(site: Site) -> None:
    with site.full():
        assert site.run("sweep", site.write(recipe("followed", steps=200)), "--no-wait").returncode == 0
        (run_id,) = site.states("followed")
        waiting(site, "followed")
        following = site.start("logs", run_id, "--follow")
        assert following.stdout is not None
        line = following.stdout.readline()
        assert line.startswith(f"# attempt 1 of {run_id} has not begun: job ") and "PENDING" in line
    out, err = following.communicate(timeout=300)
    assert following.returncode == 0, err
    assert f"# {run_id}, attempt 1, rank0.log\n" in out and out.endswith("# ended as COMPLETED\n")


def test_jobs_of_another_cluster_are_nobodys_here(site: Site) -> None:
    """Their ids mean nothing to the cluster that answers, so they must not count as ended."""
    site.run("sweep", site.write(recipe("elsewhere", steps=LONG)), "--no-wait")
    (record,) = site.sweep("elsewhere").submissions.iterdir()
    mine = record.read_text()
    record.write_text(json.dumps(json.loads(mine) | {"cluster": "other"}))
    for verb in ("status", "report"):
        done = site.run(verb, "elsewhere")
        assert done.returncode == 2 and "Slurm cluster 'other'" in done.stderr and "'test'" in done.stderr
    assert not list(site.sweep("elsewhere").root.glob("runs/*/attempts/*/outcome.json"))
    record.write_text(mine)
    assert site.run("cancel", "elsewhere").returncode == 0
