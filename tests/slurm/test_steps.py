"""Run launch.supervise.supervisor in a job of a real Slurm. Test that every run is a step, and that the outcome tells
how it ended."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.common.file_lock import Lock
from launch.contract.plan import Limits
from launch.slurm.allocation import Allocation
from tests.integration.host import wait_until
from tests.slurm.bundles import ENDLESS, Bundle, parent_of
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm

SHORT = 30
"""The steps of a run that must complete."""


@pytest.fixture(scope="module", autouse=True)
def limited(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Iterator[Bundle]:
    """Submit a job near its time limit. Begin it first and look at it last, because slurmctld enforces limits every
    half minute. Its rank is stopped, and takes no time from the others."""
    bundle = Bundle(tmp_path_factory.mktemp("limited"), cluster, [ENDLESS, SHORT], nodes=1, ranks=1)
    bundle.submit("--nodelist=node4", "--time=1")
    bundle.wait_for_step(0)
    os.kill(bundle.rank_pid(0, 0), signal.SIGSTOP)
    # The controller rejects a time that has passed when it reads the request.
    cluster.run("scontrol", "update", f"JobId={bundle.job}", "EndTime=now+10")
    yield bundle
    cluster.run("scancel", bundle.job)


def test_ranks_are_dealt_out_node_by_node_and_meet(cluster: Cluster, tmp_path: Path) -> None:
    """The job is an element of an array. Its own step got a distribution, a kind of MPI and a GPU that ranks must not
    inherit. On the second node, another job has the first GPU."""
    other = cluster.run(
        "sbatch", "--parsable", "--nodelist=node2", "--gres=gpu:1", "--output=/dev/null", "--wrap", "sleep 100"
    )
    bundle = Bundle(tmp_path, cluster, [60], environment={"OF_PROFILE": "yes"})
    leaks = "export SLURM_MPI_TYPE=none_such SLURM_DISTRIBUTION=cyclic CUDA_VISIBLE_DEVICES=7"
    bundle.submit("--nodelist=node1,node2", "--gres=gpu:2", lines=leaks, element=3)
    bundle.wait_for_step(0)
    ranks = [bundle.rank_variables(0, rank) for rank in range(4)]
    cluster.run("scancel", other)
    bundle.wait_until_over()
    assert bundle.outcomes() == ["COMPLETED"], bundle.output()
    assert bundle.account("State") == "COMPLETED"
    assert [variables["RANK"] for variables in ranks] == ["0", "1", "2", "3"]
    assert [variables["LOCAL_RANK"] for variables in ranks] == ["0", "1", "0", "1"]
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables in ranks] == ["0,1", "0,1", "1,2", "1,2"]
    for name, value in {
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "OF_PROFILE": "yes",
    }.items():
        assert {variables[name] for variables in ranks} == {value}, name
    assert bundle.nodes_of_ranks(0) == ["node1", "node1", "node2", "node2"]
    (allocation,) = bundle.allocations()
    assert (allocation["job"], allocation["nodes"]) == (bundle.job, ["node1", "node2"])
    assert bundle.job.endswith("_3")


def test_a_rank_that_dies_is_named_with_its_node_and_the_next_run_is_whole(cluster: Cluster, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster, [ENDLESS, SHORT], ranks=1)
    bundle.submit()
    bundle.wait_for_step(0)
    os.kill(bundle.rank_pid(0, 1), signal.SIGKILL)
    bundle.wait_until_over()
    killed = bundle.outcome(0)
    node = bundle.allocations()[0]["nodes"][1]
    assert (killed.failure_class, killed.rank, killed.node) == ("SIGKILL", 1, node), bundle.output()
    assert bundle.outcome(1).outcome == "COMPLETED", bundle.output()


def test_whoever_is_killed_of_a_step_nothing_is_left_of_it(cluster: Cluster, tmp_path: Path) -> None:
    """The test kills the process next to a rank, which records the rank's end, and then srun."""
    bundle = Bundle(tmp_path, cluster, [ENDLESS, ENDLESS, SHORT], nodes=1)
    bundle.submit()
    bundle.wait_for_step(0)
    os.kill(parent_of(bundle.rank_pid(0, 1)), signal.SIGKILL)
    bundle.wait_for_step(1)
    os.kill(bundle.srun_pid(1), signal.SIGKILL)
    bundle.wait_until_over()
    told = [(bundle.outcome(run).failure_class, bundle.outcome(run).rank) for run in range(2)]
    assert told == [("SIGKILL", 1), ("SIGKILL", None)], bundle.output()
    assert bundle.outcome(2).outcome == "COMPLETED", bundle.output()


def test_a_run_whose_ranks_have_all_ended_is_judged_by_their_records(cluster: Cluster, tmp_path: Path) -> None:
    """Without slurmstepd, the ranks run to their end, but srun is never told of it."""
    bundle = Bundle(tmp_path, cluster, [80, SHORT], nodes=1)
    bundle.submit()
    bundle.wait_for_step(0)
    os.kill(parent_of(parent_of(bundle.rank_pid(0, 0))), signal.SIGKILL)
    bundle.wait_until_over(300)
    assert bundle.outcomes() == ["COMPLETED", "COMPLETED"], bundle.output()


def test_a_supervisor_that_is_killed_takes_its_job_along(cluster: Cluster, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster, [ENDLESS, SHORT], nodes=1, ranks=1)
    bundle.submit()
    bundle.wait_for_step(0)
    os.kill(bundle.allocations()[0]["pid"], signal.SIGKILL)
    bundle.wait_until_over()
    assert bundle.outcomes() == [None, None]
    assert bundle.account("State") == "FAILED"


def test_a_run_that_hangs_leaves_the_stacks_of_all_its_ranks(cluster: Cluster, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster, [ENDLESS], ranks=1, limits=Limits(300, 15))
    bundle.submit()
    bundle.wait_for_step(0)
    os.kill(bundle.rank_pid(0, 1), signal.SIGSTOP)
    bundle.wait_until_over()
    hang = bundle.outcome(0)
    assert (hang.outcome, hang.message) == ("HANG", "no sign of life for 15 s"), bundle.output()
    for rank in range(2):
        assert "launch/train/loop.py" in bundle.attempt(0).log(rank).read_text(), f"a stack of rank {rank}"


def test_a_run_that_takes_more_memory_than_its_job_has(cluster: Cluster, tmp_path: Path) -> None:
    """Torch alone takes more than these 150 MB. The supervisor's own step takes less."""
    bundle = Bundle(tmp_path, cluster, [SHORT], nodes=1, ranks=1)
    bundle.submit("--mem=150")
    bundle.wait_until_over()
    full = bundle.outcome(0)
    assert (full.outcome, full.failure_class) == ("HOST_OOM", "STEP_MEMORY"), bundle.output()
    assert full.message.endswith("of host memory on a node, of 150 MB")


def test_chosen_runs_are_cancelled_and_the_others_go_on(cluster: Cluster, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster, [ENDLESS, SHORT, SHORT], nodes=1, ranks=1)
    bundle.submit()
    bundle.wait_for_step(0)
    bundle.cancel(0, 1)
    bundle.wait_until_over()
    assert bundle.outcomes() == ["CANCELLED", None, "COMPLETED"], bundle.output()
    assert not bundle.attempt(1).root.exists(), "a run that was cancelled before it began is no attempt"


def test_a_job_that_an_operator_cancels(cluster: Cluster, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster, [ENDLESS, SHORT], ranks=1)
    bundle.submit()
    bundle.wait_for_step(0)
    cluster.run("scancel", bundle.job)
    bundle.wait_until_over()
    cancelled = bundle.outcome(0)
    assert (cancelled.outcome, cancelled.message) == ("CANCELLED", "its job was cancelled"), bundle.output()
    assert not bundle.attempt(1).root.exists()


def test_a_step_that_an_operator_cancels_is_cancelled_and_the_next_run_begins(cluster: Cluster, tmp_path: Path) -> None:
    """The ranks of the second node see that the first node's are gone, because Slurm reaches their node last."""
    bundle = Bundle(tmp_path, cluster, [ENDLESS, SHORT], ranks=1)
    bundle.submit()
    bundle.wait_for_step(0)
    steps = (line.split() for line in cluster.run("squeue", "--noheader", "--steps", "--format=%i %j").splitlines())
    names = {step: name for step, name in steps if step.startswith(f"{bundle.job}.")}
    (step,) = (step for step, name in names.items() if name == f"{bundle.run_ids[0]}.1")
    slurmstepd = parent_of(parent_of(bundle.rank_pid(0, 1)))
    os.kill(slurmstepd, signal.SIGSTOP)
    try:
        cluster.run("scancel", step)
        wait_until(bundle.attempt(0).rank_exit(1).exists, 60, "the second rank to see it", bundle.output)
    finally:
        os.kill(slurmstepd, signal.SIGCONT)
    bundle.wait_until_over()
    assert bundle.outcomes() == ["CANCELLED", "COMPLETED"], bundle.output()
    assert bundle.outcome(0).message == "cancelled while it ran"


def test_a_node_that_fails_is_named(cluster: Cluster, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster, [ENDLESS], ranks=1)
    bundle.submit("--no-requeue", "--nodelist=node2,node3")
    bundle.wait_for_step(0)
    cluster.run("scontrol", "update", "NodeName=node3", "State=DOWN", "Reason=test")
    bundle.wait_until_over()
    cluster.run("scontrol", "update", "NodeName=node3", "State=RESUME")
    lost = bundle.outcome(0)
    assert (lost.outcome, lost.node) == ("NODE_FAIL", "node3"), bundle.output()


def test_a_job_that_is_put_back_into_the_queue_goes_on_with_what_had_not_begun(
    cluster: Cluster, tmp_path: Path
) -> None:
    bundle = Bundle(tmp_path, cluster, [ENDLESS, SHORT], nodes=1, ranks=1)
    bundle.submit()
    bundle.wait_for_step(0)
    cluster.run("scontrol", "requeue", bundle.job)
    wait_until(lambda: bundle.state() == "PENDING", 60, "the job to be back in the queue", bundle.state)
    # Otherwise Slurm would wait for two minutes.
    cluster.run("scontrol", "update", f"JobId={bundle.job}", "StartTime=now")
    # Until then squeue may list it in no state for seconds. If the job was still completing, Slurm does wait.
    wait_until(lambda: len(bundle.allocations()) == 2, 240, "the job to start again", bundle.output)
    bundle.wait_until_over()
    requeued = bundle.outcome(0)
    assert (requeued.outcome, requeued.failure_class) == ("PREEMPTED", "REQUEUED"), bundle.output()
    assert bundle.outcomes() == ["PREEMPTED", "COMPLETED"]
    assert [requeued.allocation, bundle.outcome(1).allocation] == ["bundle.1", "bundle.2"]


def test_a_supervisor_that_alone_is_asked_to_end_cancels(cluster: Cluster, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster, [ENDLESS], nodes=1, ranks=1)
    bundle.submit()
    bundle.wait_for_step(0)
    os.kill(bundle.allocations()[0]["pid"], signal.SIGTERM)
    bundle.wait_until_over()
    assert bundle.outcome(0).outcome == "CANCELLED", bundle.output()
    assert bundle.account("State") == "COMPLETED"


def test_a_lock_that_a_file_system_has_kept_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster, [SHORT], nodes=1, ranks=1)
    kept = Lock.try_acquire(bundle.paths.lock)
    assert kept is not None
    bundle.submit()
    wait_until(lambda: bool(bundle.processes()), 60, "the job")
    time.sleep(2)
    assert not bundle.allocations()
    kept.release()
    bundle.wait_until_over()
    assert bundle.outcomes() == ["COMPLETED"], bundle.output()


def test_a_step_that_cannot_begin(cluster: Cluster, tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, cluster, [SHORT], nodes=1, arguments=["--mpi=none_such"])
    bundle.submit()
    bundle.wait_until_over()
    never = bundle.outcome(0)
    assert (never.outcome, never.failure_class) == ("ENVIRONMENT", "LAUNCH"), bundle.output()
    assert "none_such" in (bundle.attempt(0).logs / "launcher.log").read_text()


def test_ranks_that_cannot_meet(cluster: Cluster, tmp_path: Path) -> None:
    """Another process listens where rank 0 must. The other ranks fail too, or are ended because of it."""
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        bundle = Bundle(tmp_path, cluster, [SHORT], ranks=1, environment={"MASTER_PORT": port})
        bundle.submit()
        bundle.wait_until_over()
    alone = bundle.outcome(0)
    assert (alone.outcome, alone.failure_class) == ("ENVIRONMENT", "COMMUNICATOR_SETUP"), bundle.output()
    assert (alone.rank, alone.node) == (0, bundle.allocations()[0]["nodes"][0])


def test_a_notice_of_preemption_disturbs_nobody(cluster: Cluster, tmp_path: Path) -> None:
    """The batch script makes Slurm send SIGUSR2 to every process of the job."""
    bundle = Bundle(tmp_path, cluster, [80], nodes=1, ranks=1)
    bundle.submit()
    bundle.wait_for_step(0)
    cluster.run("scancel", "--signal=USR2", bundle.job)
    bundle.wait_until_over()
    assert bundle.outcomes() == ["COMPLETED"], bundle.output()


def test_a_job_that_reaches_its_time_limit(limited: Bundle) -> None:
    limited.wait_until_over()
    late = limited.outcome(0)
    assert (late.outcome, late.failure_class) == ("TIMEOUT", "JOB_TIMEOUT"), limited.output()
    assert not limited.attempt(1).root.exists()


def test_no_run_begins_while_the_controller_is_away(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.environment[name])
    job = cluster.run("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap", "true")
    allocation = Allocation(job, ("node1",))
    cluster.stop("slurmctld")
    gave_up = time.monotonic() + 8
    allocation.wait_for_controller(lambda: time.monotonic() > gave_up)
    assert time.monotonic() > gave_up, "it went on without a controller"
    cluster.start("slurmctld")
    allocation.wait_for_controller(lambda: False)
    cluster.run("scancel", job)
    cluster.wait_until_idle()
