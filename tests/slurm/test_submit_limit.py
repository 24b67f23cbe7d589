"""Test that a sweep with more jobs than Slurm accepts at a time submits the rest as jobs end, each once."""

from __future__ import annotations

import contextlib
import signal
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
