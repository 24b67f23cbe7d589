"""Test that a full disk ends only the current run, and that the outcome names it.

A limit on file sizes replaces the full disk, in the job's shell or in running processes, because only administrators
can mount a small disk.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.integration.host import recipe, wait_until
from tests.slurm.bundles import ENDLESS, Bundle, parent_of
from tests.slurm.cluster import Cluster
from tests.slurm.site import Site

pytestmark = pytest.mark.slurm


def bound(pids: Collection[int], most_bytes: int | None) -> None:
    """Limit the size of files that these processes write; None removes the limit."""
    for pid in pids:
        _, highest = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (highest if most_bytes is None else most_bytes, highest))


def test_a_run_that_fills_its_disk_is_made_again_once_there_is_room(site: Site) -> None:
    # The limit is in KiB, and a step takes an eighth of it. Without the variable, Python 3.11 would write truncated
    # compiled modules, and all later runs would fail.
    site.profile(setup=["ulimit -S -f 20", "export PYTHONDONTWRITEBYTECODE=1"])
    content = recipe("full", sweep={"points": [{"training.steps": 200}, {"training.steps": 40}]})
    assert site.run("sweep", site.write(content), "--no-wait").returncode == 0
    site.wait_until_over()
    full, small = site.states("full")
    assert site.states("full") == {full: "ENVIRONMENT", small: "COMPLETED"}
    outcome = site.outcome("full", full)
    assert (outcome.failure_class, outcome.phase) == ("DISK_FULL", "measure"), outcome
    assert "resume the sweep" in outcome.remedy

    site.profile()
    resumed = site.run("resume", "full")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert site.attempts("full") == {full: [1, 2], small: [1]}
    assert set(site.states("full").values()) == {"COMPLETED"}


def test_cancel_ends_jobs_though_the_disk_is_full(site: Site) -> None:
    site.profile(max_jobs=1)
    points = [{"training.seed": 1}, {"training.seed": 2}]
    runs = site.begin_unwatched(recipe("full", steps=ENDLESS, sweep={"points": points}))
    site.wait_for_step("full", runs[0])
    bound([site.supervisor("full")], 1)
    cancelled = site.run("cancel", "full", limit_bytes=1)
    assert cancelled.returncode == 2 and "the runs have ended, but not every outcome" in cancelled.stderr
    assert "free space there" in cancelled.stderr
    assert site.queue() == {}
    assert site.states("full") == dict.fromkeys(runs, "CANCELLED")
    site.wait_for_nobody(5)


def test_where_nothing_can_be_written_the_outcome_waits_for_room_and_the_bundle_goes_on(
    cluster: Cluster, tmp_path: Path
) -> None:
    bundle = Bundle(tmp_path, cluster, [ENDLESS, 30], nodes=1, ranks=1)
    bundle.submit()
    bundle.wait_for_step(0)
    supervisor, rank = bundle.allocations()[0]["pid"], bundle.rank_pid(0, 0)
    bound([supervisor, parent_of(rank), rank], 1)
    wait_until(lambda: rank not in bundle.processes(), 60, "the rank's end", bundle.output)
    wait_until(
        lambda: "launch.supervise.slurm_rank" not in str(bundle.processes()), 60, "that of its parent", bundle.processes
    )
    time.sleep(1)
    assert supervisor in bundle.processes() and not bundle.attempt(0).outcome.exists()
    assert bundle.state() == "RUNNING" and not bundle.attempt(1).root.exists()

    bound([supervisor], None)
    bundle.wait_until_over()
    full = bundle.outcome(0)
    assert (full.outcome, full.failure_class, full.phase) == ("ENVIRONMENT", "DISK_FULL", "measure"), full
    assert bundle.outcome(1).outcome == "COMPLETED", bundle.output()
