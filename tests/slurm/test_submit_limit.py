"""Test that a sweep with more jobs than Slurm accepts at a time submits the rest as jobs end, each once."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from launch.contract.exit_codes import ExitCode
from tests.integration.host import recipe, wait_until
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import user_name
from tests.slurm.site import Site

pytestmark = pytest.mark.slurm


def some(name: str, bundles: int, **fields: Any) -> dict[str, Any]:
    return recipe(name, sweep={"grid": {"training.seed": list(range(bundles))}}, **fields)


@contextlib.contextmanager
def submit_limit(cluster: Cluster, jobs: int) -> Iterator[None]:
    """Let this user have at most ``jobs`` jobs that wait or run, for the time of the block."""

    def limit(number: int) -> None:
        cluster.run("sacctmgr", "--immediate", "modify", "user", user_name(), "set", f"MaxSubmitJobs={number}")

    def known() -> list[str]:
        lines = cluster.run("scontrol", "--oneliner", "show", "assoc_mgr", "flags=assoc").splitlines()
        return [line for line in lines if f"MaxSubmitJobs={jobs}(" in line]

    limit(jobs)
    try:
        wait_until(lambda: bool(known()), 60, "slurmctld to know the limit")
        yield
    finally:
        limit(-1)


def test_a_waiting_command_submits_the_rest_as_jobs_end(site: Site, cluster: Cluster) -> None:
    """A command that does not wait says what submits the rest, a killed one loses nothing, and two submit nothing twice."""
    path = site.write(some("rest", 5, steps=40))
    with submit_limit(cluster, 2):
        short = site.run("sweep", path, "--no-wait")
        assert (
            short.returncode == ExitCode.UNFINISHED
            and "3 of them wait until Slurm accepts more jobs (AssocMaxSubmitJobLimit)" in short.stdout
        )
        assert "this submits the rest:\n" in short.stderr and "resume rest" in short.stderr
        assert len(site.queue()) == 2

        killed = site.start("sweep", path)
        wait_until(lambda: len(site.job_ids("rest")) > 1, 120, "a job that follows")
        killed.send_signal(signal.SIGKILL)
        killed.communicate()

        commands = [site.start("sweep", path), site.start("resume", "rest")]
        ends = [(command.communicate(timeout=300), command.returncode) for command in commands]
    assert [code for _, code in ends] == [0, 0], ends
    assert set(map(tuple, site.attempts("rest").values())) == {(1,)}
    assert list(site.accounts("State").values()) == ["COMPLETED"] * 5


@contextlib.contextmanager
def full_queue(cluster: Cluster, room: int) -> Iterator[None]:
    """Let all users together have at most ``room`` more jobs, for the time of the block."""
    path = cluster.folder / "slurm.conf"
    before = path.read_text()
    # Ended jobs count until slurmctld forgets them, so it must forget none meanwhile.
    keeping = f"{before}MinJobAge=3600\n"
    path.write_text(keeping)
    cluster.run("scontrol", "reconfigure")
    # Slurm 22.05 refuses the last job.
    most = len(cluster.run("squeue", "--noheader", "--array", "--states=all").splitlines()) + room + 1
    path.write_text(f"{keeping}MaxJobCount={most}\n")
    cluster.run("scontrol", "reconfigure")
    try:
        yield
    finally:
        path.write_text(before)
        cluster.run("scontrol", "reconfigure")


def test_a_full_queue_is_waited_for_and_holds_up_no_other_command(site: Site, cluster: Cluster) -> None:
    """sbatch would ask again for two minutes, for each size of array, and then call it a failure."""
    path = site.write(some("full", 3))
    with full_queue(cluster, 1):
        began = time.monotonic()
        short = site.run("sweep", path, "--no-wait")
        assert time.monotonic() - began < 60
        assert short.returncode == ExitCode.UNFINISHED, short.stdout + short.stderr
        assert "wait until Slurm accepts more jobs (MaxJobCount, of all users together)" in short.stdout
        assert len(site.job_ids("full")) == 1
        waiting = site.start("resume", "full")
        wait_until(lambda: site.has_ended("full"), 120, "the first run")
    out, err = waiting.communicate(timeout=180)
    assert waiting.returncode == 0, out + err
    assert set(map(tuple, site.attempts("full").values())) == {(1,)}
    assert list(site.accounts("State").values()) == ["COMPLETED"] * 3


def test_what_waits_for_room_outlives_a_drained_partition(site: Site, cluster: Cluster) -> None:
    def drain(state: str) -> None:
        cluster.run("scontrol", "update", "PartitionName=gpu", f"State={state}")

    path = site.write(some("drained", 2))
    with submit_limit(cluster, 1):
        sweep = site.start("sweep", path)
        assert sweep.stdout is not None and sweep.stderr is not None
        assert any("1 of them wait" in line for line in sweep.stdout)
        drain("DRAIN")
        try:
            said = next(line for line in sweep.stderr if "not submitted yet" in line)
        finally:
            drain("UP")
        out, err = sweep.communicate(timeout=180)
    assert "not submitted yet: Slurm takes no jobs now: " in said and sweep.returncode == 0, said + out + err
    assert set(site.states("drained").values()) == {"COMPLETED"}


def test_what_waits_for_room_is_cancelled_too(site: Site, cluster: Cluster) -> None:
    path = site.write(some("long", 3, steps=10**6))
    with submit_limit(cluster, 1):
        waiting = site.start("sweep", path)
        first, *_ = wait_for_runs(site, "long")
        site.wait_for_step("long", first)
        assert list(site.states("long").values()) == ["RUNNING", "PLANNED", "PLANNED"]
        cancelled = site.run("cancel", "long")
        assert "cancelled 3 runs of long" in cancelled.stdout, cancelled.stdout + cancelled.stderr
        out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == ExitCode.FAILED, out + err
    assert set(site.states("long").values()) == {"CANCELLED"}
    assert len(site.accounts("State")) == 1


def wait_for_runs(site: Site, name: str) -> list[str]:
    wait_until(lambda: bool(site.job_ids(name)), 120, "a job")
    return site.run_ids(name)
