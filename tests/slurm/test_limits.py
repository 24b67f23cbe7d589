"""Test that cells which the cluster cannot run are recognized before anything is submitted, and that the plan shows the
others."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.contract.paths import SweepPaths
from orchestrator.submit.job_arrays import Array
from orchestrator.submit.sbatch import BatchJob, batch_script
from orchestrator.targets.job_request import JobRequest
from orchestrator.targets.profile import Profile
from tests.integration.host import recipe
from tests.slurm.cluster import Cluster
from tests.slurm.site import Site

pytestmark = pytest.mark.slurm

GPUS = {"device": "cuda", "nodes": 2, "gpus_per_node": 8}


def plan(site: Site, *arguments: str, **fields: Any) -> dict[str, Any]:
    done = site.run("plan", site.write(recipe("limits", **fields)), "--json", *arguments)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(done.stdout)
    return content


def reasons(content: dict[str, Any]) -> list[tuple[str, str]]:
    return [(reason["rule"], reason["message"]) for cell in content["cells"] for reason in cell["reasons"]]


def lacking(site: Site, *arguments: str, **resources: Any) -> list[tuple[str, str]]:
    """Return why the only cell of a recipe with ``resources`` is not run."""
    ranks = resources.get("nodes", 1) * resources.get("gpus_per_node", 1)
    fields = {"resources": resources, "training": {"global_batch_size": ranks, "micro_batch_size": 1}}
    return reasons(plan(site, *arguments, **fields))


@contextlib.contextmanager
def partition(cluster: Cluster, **fields: str) -> Iterator[None]:
    """Give the partition other ``fields`` for the time of the block."""
    before = {"MaxTime": "UNLIMITED", "MaxNodes": "UNLIMITED", "State": "UP"}
    cluster.run("scontrol", "update", "PartitionName=gpu", *(f"{name}={value}" for name, value in fields.items()))
    try:
        yield
    finally:
        cluster.run("scontrol", "update", "PartitionName=gpu", *(f"{name}={before[name]}" for name in fields))


def test_the_cluster_as_it_is_runs_what_fits_and_names_what_does_not(site: Site) -> None:
    assert lacking(site, **GPUS) == []
    assert lacking(site, **GPUS | {"nodes": 5}) == [("cluster.nodes", "the run needs 5 nodes, and partition gpu has 4")]
    assert lacking(site, **GPUS | {"gpus_per_node": 9}) == [
        ("cluster.gpus", "the run needs 9 GPUs on a node, and nodes of partition gpu have at most 8")
    ]
    assert lacking(site, **GPUS | {"threads_per_rank": 3}) == [
        ("cluster.cpus", "the run needs 24 CPUs on a node, and nodes of partition gpu have at most 16")
    ]
    assert plan(site, resources={"device": "auto"})["cells"][0]["spec"]["placement"]["device"] == "cuda"


def test_limits_of_the_partition(site: Site, cluster: Cluster) -> None:
    with partition(cluster, MaxTime="1:30:00", MaxNodes="1"):
        assert lacking(site, minutes_per_run=79) == []
        ((rule, message),) = lacking(site, minutes_per_run=80)
        assert rule == "cluster.time"
        assert "an allocation of 91 minutes, and partition gpu allows at most 90" in message
        ((rule, message),) = lacking(site, **GPUS)
        assert (rule, message) == (
            "cluster.nodes",
            "the run needs 2 nodes, and partition gpu gives a job at least 0 and at most 1",
        )


def test_a_partition_in_which_nothing_starts(site: Site, cluster: Cluster) -> None:
    for state in ("DOWN", "DRAIN", "INACTIVE"):
        with partition(cluster, State=state):
            assert lacking(site, **GPUS) == [("cluster.partition", f"partition gpu is {state}: no job starts in it")]
    with partition(cluster, State="DOWN"):
        done = site.run("plan", site.write(recipe("limits")))
        assert "1 not runnable on this cluster" in done.stdout
        assert "#SBATCH" not in done.stdout


def test_only_nodes_with_the_feature_count(site: Site, cluster: Cluster) -> None:
    site.profile("fast", constraint="fast")
    cluster.run("scontrol", "update", "NodeName=node1", "AvailableFeatures=fast,new", "ActiveFeatures=fast,new")
    try:
        assert lacking(site, "--cluster", "fast", **GPUS | {"nodes": 1}) == []
        assert lacking(site, "--cluster", "fast", **GPUS) == [
            ("cluster.nodes", "the run needs 2 nodes, and partition gpu with feature fast has 1")
        ]
        assert lacking(site, **GPUS) == []
    finally:
        cluster.run("scontrol", "update", "NodeName=node1", "AvailableFeatures=", "ActiveFeatures=")


def test_a_profile_decides_where_and_how_much(site: Site) -> None:
    site.profile("small", max_nodes=1, mem="100G")
    site.profile("typo", partition="gpuu")
    assert lacking(site, "--cluster", "small", **GPUS) == [
        ("cluster.max_nodes", "the run needs 2 nodes, and max_nodes of the profile lets a sweep use 1 at a time")
    ]
    assert lacking(site, "--cluster", "small") == [
        (
            "cluster.memory",
            "the run needs 102,400 MB of memory on a node, and nodes of partition gpu have at most 64,000",
        )
    ]
    done = site.run("plan", site.write(recipe("limits", cluster="typo")))
    assert done.returncode == 1
    assert (
        done.stderr == "error: profile typo: partition: the cluster has no partition 'gpuu'\n    did you mean 'gpu'?\n"
    )
    # The command line takes precedence over the recipe.
    assert lacking(site, "--cluster", "small", "cluster=typo", **GPUS)


# --- what is shown --------------------------------------------------------------------------------------------------


def test_the_scripts_that_plan_shows_are_taken_by_sbatch(site: Site, cluster: Cluster, tmp_path: Path) -> None:
    site.profile(
        "wide", partition="gpu", mem="8G", max_jobs=2, wckey="key", max_pending_minutes=5,
        setup=["echo ${HOME} 'a b'"], sbatch={"comment": "it's \"so\"", "contiguous": None, "mail-type": "NONE"},
    )  # fmt: skip
    grid = {"parallelism.dp": [1, 2, 4], "training.seed": [1, 2, 3], "training.global_batch_size": [4]}
    for arguments in ((), ("--cluster", "wide")):
        content = plan(site, *arguments, sweep={"grid": grid})
        scripts = content["batch_scripts"]
        shown = [bundle for script in scripts for bundle in script["bundles"]]
        assert sorted(shown) == sorted(bundle["bundle_id"] for bundle in content["bundles"])
        assert len({script["text"] for script in scripts}) == len(scripts) >= 3
        for script in scripts:
            path = tmp_path / "script.sh"
            path.write_text(script["text"])
            cluster.run("sbatch", "--test-only", str(path))
        text = site.run("plan", str(site.folder / "limits.yaml"), *arguments).stdout
        assert all(script["text"].rstrip() in text and script["srun"] in text for script in scripts[:3])
    assert not site.store.exists()


def test_nodes_that_a_profile_leaves_aside_stay_aside_in_a_retry(tmp_path: Path) -> None:
    size, profile = JobRequest(1, 1, 1, 0, 10), Profile(sbatch={"exclude": "node[1-2]"})
    for failed, excluded in (((), "node[1-2]"), (("node3",), "node3,node[1-2]")):
        text = batch_script(BatchJob(SweepPaths(tmp_path), tmp_path, Array(size, ("b",)), profile, "name", failed))
        assert re.findall(r"--exclude='?([^'\n]*)", text) == [excluded]


def test_a_command_asks_slurm_a_few_times_and_no_more(site: Site) -> None:
    asked = site.folder / "asked"
    for name in ("scontrol", "sinfo", "squeue", "sacct"):
        site.program(name, f'echo {name} "$@" >> {asked}\nexec $REAL "$@"')
    grid = {"training.seed": list(range(20)), "parallelism.dp": [1, 2]}
    plan(site, sweep={"grid": grid})
    assert 1 <= len(asked.read_text().splitlines()) <= 4, asked.read_text()


def test_what_the_shell_sets_for_sbatch_goes_before_no_profile(site: Site) -> None:
    site.environment |= {"SBATCH_PARTITION": "nowhere", "SBATCH_TIMELIMIT": "1", "SBATCH_JOB_NAME": "mine"}
    path = site.write(recipe("shell", steps=20, resources={"minutes_per_run": 5}))
    done = site.run("plan", path)
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        1,
        "error: partition: the cluster has no partition 'nowhere'",
    )
    site.profile(partition="gpu")
    done = site.run("sweep", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(site.accounts("Timelimit").values()) == {"00:16:00"}
    assert "mine" not in site.accounts("JobName").values()


# --- which target ---------------------------------------------------------------------------------------------------


def test_a_plan_for_this_host_is_there_for_the_asking(site: Site) -> None:
    content = plan(site, "--executor", "local", cluster="somewhere")
    assert (content["scheduler"], content["batch_scripts"]) == ("host", [])
    done = site.run("plan", site.write(recipe("limits")), "--executor", "local", "--cluster", "x")
    assert done.returncode == 1
    assert done.stderr.startswith("error: --cluster: x: profiles are for Slurm")


def test_slurm_that_does_not_answer_is_told_from_one_that_is_not_there(site: Site) -> None:
    path = site.write(recipe("limits"))
    site.program(
        "sinfo", "echo 'slurm_load_partitions: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    )
    for executor in ("auto", "slurm"):
        done = site.run("sweep", path, "--executor", executor)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "error: Slurm is installed here, but does not answer (slurm_load_partitions: Unable to contact slurm "
            "controller (connect failure))\n    try again when `scontrol ping` prints UP, or run on this host: --executor "
            "local; plan --cluster NAME needs no Slurm\n"
        )
    assert not site.store.exists()
    assert site.run("plan", path, "--executor", "local").returncode == 0
    site.without_program("sinfo")
    site.program("scontrol", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    done = site.run("plan", path)
    assert done.returncode == 2
    assert "Slurm does not answer `scontrol --all --oneliner show partition`" in done.stderr


def test_a_sweep_is_resumed_where_it_was_planned(site: Site) -> None:
    path = site.write(recipe("limits", steps=20))
    assert site.run("sweep", path, "--executor", "local").returncode == 0
    done = site.run("resume", "limits", "--executor", "slurm")
    assert done.returncode == 1
    assert "was planned for a host, but would be resumed on a Slurm cluster" in done.stderr
    assert "--executor local" in done.stderr
