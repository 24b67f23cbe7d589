"""Test that the ranks of a bundle are forks of one server, and train as new interpreters do. Killing the server costs
at most one run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.host import Host, rank_pid, recipe
from tests.records import trained_bits


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_server_ends_its_run_and_no_other(host: Host) -> None:
    with host.held():
        sweep, (killed, later) = host.begin(recipe("mini", repeats=2))
        attempt = host.wait_for_step("mini", killed)
        server = parent(rank_pid(attempt))
        assert str(Path(f"/proc/{server}/fd/0").readlink()).startswith("socket:"), "where a server is given orders"
        os.kill(server, signal.SIGKILL)
    out, _ = sweep.communicate(timeout=300)
    outcome = host.outcome("mini", killed)
    assert (outcome.outcome, outcome.failure_class, outcome.rank) == ("FAILED", "SIGKILL", 0), out
    assert host.outcome("mini", later).outcome == "COMPLETED", "by another server"
    assert sweep.returncode == 3
    host.wait_for_nobody()


@pytest.mark.slow
def test_forks_train_as_new_interpreters_do(tmp_path: Path, compile_cache: Path) -> None:
    """All bits are equal, eager and compiled, and the log says why ranks are new interpreters."""
    forked, started = Host(tmp_path / "forked", compile_cache), Host(tmp_path / "started", compile_cache)
    started.end_fork_servers()
    for host in (forked, started):
        host.run("sweep", host.write(recipe("alike", steps=20, graphed=True)))
        assert set(host.states("alike").values()) == {"COMPLETED"}
    assert forked.run_ids("alike") == started.run_ids("alike") and len(forked.run_ids("alike")) == 2
    for run_id in forked.run_ids("alike"):
        one, other = (host.sweep("alike").run(run_id).attempt(1) for host in (forked, started))
        assert trained_bits(one) == trained_bits(other)
        assert one.read(one.environment) == other.read(other.environment)
    (log,) = started.sweep("alike").root.glob("bundles/*/supervisor.log")
    said = log.read_text()
    assert "not on this host" in said and "the fork server ended, so each rank is started as a new interpreter" in said
    (log,) = forked.sweep("alike").root.glob("bundles/*/supervisor.log")
    assert log.read_text() == ""
