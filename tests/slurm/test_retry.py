"""Test that a command which watches a sweep retries runs that infrastructure ended, on other nodes."""

from __future__ import annotations

import pytest

from launch.common.atomic_files import read_json_lines
from launch.contract.outcomes import read_outcome
from tests.integration.host import recipe, wait_until
from tests.slurm.site import Site

pytestmark = pytest.mark.slurm


def test_a_run_whose_node_failed_is_made_again_on_another_by_the_next_command(site: Site) -> None:
    """The command that watched the run is dead by then. The retry runs in one job with the run that had not begun."""
    with site.held():
        watching, (failed, later) = site.begin(recipe("node", repeats=2))
        attempt = site.wait_for_step("node", failed)
        watching.kill()
        watching.communicate()
        (bundle,) = site.sweep("node").root.glob("bundles/*")
        (node,) = next(read_json_lines(bundle / "allocations.jsonl"))["nodes"]
        site.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        try:
            wait_until(lambda: site.states("node")[failed] == "NODE_FAIL", 60, "the job to end", site.queue)
        finally:
            site.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
    done = site.run("sweep", str(site.folder / "node.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"excluded nodes: {node}; " in done.stdout and "2 runs to start" in done.stdout
    attempts = site.attempts("node")
    # A supervisor may outlive its ranks, and then begins the next run on the failing node.
    assert attempts in ({failed: [1, 2], later: [1]}, {failed: [1, 2], later: [1, 2]}), done.stdout
    first = [
        read_outcome(site.sweep("node").run(run_id).attempt(1)) for run_id in attempts if len(attempts[run_id]) > 1
    ]
    assert all(outcome is None or outcome.is_infrastructure for outcome in first), first
    assert site.states("node") == {failed: "COMPLETED", later: "COMPLETED"}
    assert attempt.outcome.exists()
    nodes = [line["nodes"] for line in read_json_lines(bundle / "allocations.jsonl")]
    assert len(nodes) == 2 and nodes[1] != [node]
    site.wait_for_nobody()


def test_where_no_other_node_will_do_a_run_is_made_again_on_the_one_that_failed(site: Site) -> None:
    """sbatch rejects a job that excludes the only node it may run on. So the retry must not exclude this node."""
    only = ("scontrol", "update", "NodeName=node3")
    site.cluster.run(*only, "AvailableFeatures=only", "ActiveFeatures=only")
    try:
        site.profile(constraint="only")
        path = site.write(recipe("alone"))
        with site.held():
            assert site.run("sweep", path, "--no-wait").returncode == 0
            (run_id,) = site.states("alone")
            site.wait_for_step("alone", run_id)
            site.cluster.run(*only, "State=DOWN", "Reason=test")
            wait_until(lambda: site.states("alone")[run_id] == "NODE_FAIL", 60, "the job to end", site.queue)
        site.cluster.run(*only, "State=RESUME")
        done = site.run("sweep", path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "not on node3" not in done.stdout
        assert site.attempts("alone") == {run_id: [1, 2]}
        nodes = [line["nodes"] for path in site.sweep("alone").root.glob("bundles/*/allocations.jsonl")
                 for line in read_json_lines(path)]  # fmt: skip
        assert nodes == [["node3"], ["node3"]]
    finally:
        site.cluster.run(*only, "AvailableFeatures=", "ActiveFeatures=")
