"""Test that the cluster does what other tests assume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, Cluster
from tests.slurm.configuration import ClusterError

pytestmark = pytest.mark.slurm

ALLOCATE_200_MB = f"{sys.executable} -c 'import time; x = bytearray(200 << 20); time.sleep(60)'"
STUBBORN = "trap '' TERM; setsid sleep 1000 & setsid sleep 1000"
"""The script of a job whose processes leave its session and ignore SIGTERM."""


def test_srun_reaches_two_nodes(cluster: Cluster) -> None:
    # All four nodes have the host's name. SLURMD_NODENAME tells them apart.
    names = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", "printenv", "SLURMD_NODENAME").split()
    assert len(set(names)) == 2


def test_an_array_runs_every_element(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, f"touch {tmp_path}/$SLURM_ARRAY_TASK_ID", "--array=0-3")
    wait_until(lambda: accounts(cluster, job, "State") == ["COMPLETED"] * 4, "four elements")
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3"}


def test_accounting_knows_how_a_job_ended(cluster: Cluster) -> None:
    job = submit(cluster, "exit 3")
    wait_until(lambda: accounts(cluster, job, "State,ExitCode") == ["FAILED|3:0"], "FAILED")


def test_each_step_of_a_job_is_accounted_for(cluster: Cluster) -> None:
    job = submit(cluster, "srun --overlap --nodes=2 true; srun --overlap false; srun --overlap true", "--nodes=2")
    wait_until(lambda: accounts(cluster, job, "State") == ["COMPLETED"], "COMPLETED")
    steps = [step for step in accounts(cluster, job, "JobID,State", steps=True) if "batch" not in step]
    assert steps[1:] == [f"{job}.0|COMPLETED", f"{job}.1|FAILED", f"{job}.2|COMPLETED"]


def test_a_step_over_its_memory_is_killed_and_its_use_accounted_for(cluster: Cluster) -> None:
    """Slurm reports OUT_OF_MEMORY only if the kernel's cgroup killed the step. OverMemoryKill leaves SIGKILL and the
    figures."""
    job = submit(cluster, f"srun {ALLOCATE_200_MB}", "--mem=50")
    wait_until(lambda: accounts(cluster, job, "State") == ["FAILED"], "FAILED")
    step = next(line for line in accounts(cluster, job, "JobID,ExitCode,MaxRSS", steps=True) if f"{job}.0|" in line)
    _, code, used = step.split("|")
    assert code == "0:9"
    assert float(used.removesuffix("M")) > 50
    assert "Exceeded job memory limit" in output(cluster, job)


def test_a_node_taken_down_fails_its_job_and_comes_back(cluster: Cluster) -> None:
    job = submit(cluster, "sleep 60", "--no-requeue", "--nodelist=node4")
    wait_until(lambda: cluster.run("squeue", "-ho", "%t", "-j", job) == "R", "a running job")
    cluster.run("scontrol", "update", "NodeName=node4", "State=DOWN", "Reason=test")
    wait_until(lambda: accounts(cluster, job, "State") == ["NODE_FAIL"], "NODE_FAIL")
    assert cluster.run("sinfo", "-ho", "%t", "-n", "node4") == "down"
    cluster.run("scontrol", "update", "NodeName=node4", "State=RESUME")
    cluster.wait_until_idle()


def test_a_job_sees_the_gpus_it_asked_for(cluster: Cluster) -> None:
    assert cluster.run("srun", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES") == "0,1"


def test_a_queued_job_outlives_the_controller(cluster: Cluster) -> None:
    job = submit(cluster, "true", "--hold")
    cluster.stop("slurmctld")
    cluster.start("slurmctld")
    cluster.wait_until_idle()
    cluster.run("scontrol", "release", job)
    wait_until(lambda: accounts(cluster, job, "State") == ["COMPLETED"], "COMPLETED")


def test_down_ends_every_process_of_one_cluster_and_none_of_another(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("other")  # The path of a test's own folder is too long for sockets.
    command_line("up", folder)
    other = Cluster(folder)
    submit(other, STUBBORN)
    wait_until(lambda: len(processes_of(folder, "sleep")) == 2, "the job")
    command_line("down", folder)
    assert not processes_of(folder)
    assert not folder.exists()
    cluster.wait_until_idle()


def test_the_daemons_end_with_the_process_they_are_for(tmp_path: Path) -> None:
    for name in ("daemons", "log"):
        (tmp_path / name).mkdir()
    (tmp_path / "daemons.json").write_text(json.dumps({"one": ["sh", "-c", STUBBORN]}))
    (tmp_path / "daemons" / "one").touch()
    supervise = "import os, subprocess, sys; subprocess.run([*sys.argv[1:], str(os.getpid())])"
    supervisor = [sys.executable, "-m", "tests.slurm.supervisor", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-c", supervise, *supervisor], cwd=ROOT) as process:
        wait_until(lambda: len(processes_of(tmp_path, "sleep")) == 2, "the daemon")
        process.kill()
    wait_until(lambda: not processes_of(tmp_path), "the end of all")


def test_a_folder_with_too_long_a_name_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="use a shorter folder"):
        Cluster(tmp_path / ("a" * 80)).up(with_this_process=True)


def test_a_host_without_the_packages_is_told_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.slurm.cluster", "up", str(tmp_path / "none")],
        cwd=ROOT, env={"PATH": str(tmp_path)}, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "apt-get install --no-install-recommends slurmctld slurmd" in done.stderr
    assert not (tmp_path / "none").exists()


def submit(cluster: Cluster, script: str, *options: str) -> str:
    return cluster.run("sbatch", "--parsable", f"--output={cluster.folder}/tmp/%A.out", *options, "--wrap", script)


def output(cluster: Cluster, job: str) -> str:
    return (cluster.folder / "tmp" / f"{job}.out").read_text()


def accounts(cluster: Cluster, job: str, fields: str, *, steps: bool = False) -> list[str]:
    """Return a line for each job or array element, and with ``steps`` for each of its steps, from accounting."""
    options = [] if steps else ["--allocations"]
    return cluster.run("sacct", "-nP", "--units=M", *options, "-j", job, "-o", fields).splitlines()


def command_line(action: str, folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.slurm.cluster", action, str(folder)], cwd=ROOT, check=True, timeout=180
    )


def processes_of(folder: Path, name: str = "") -> list[int]:
    """Return the processes that have the cluster's folder in their environment or on their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            if os.fsencode(folder) in told and name in (process / "comm").read_text():
                found.append(int(process.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds} s for {what}"
        time.sleep(0.2)
