"""Test how a run becomes a step of a Slurm job, as far as this needs no Slurm."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from launch.common.atomic_files import write_json
from launch.contract.bundle import BundleOrder, Step
from launch.contract.cancellation import read_cancellation
from launch.contract.errors import EnvironmentFault
from launch.contract.paths import AttemptPaths, BundlePaths, SweepPaths
from launch.contract.plan import Limits
from launch.contract.spec import Command, Placement, RunSpec
from launch.failures.diagnose import Diagnosis, Evidence
from launch.slurm.allocation import PORTS, Allocation, free_port, queue_state
from launch.slurm.step_end import StepEnd, cancelled_first, parse_step_end
from launch.supervise import child_process
from launch.supervise.slurm_rank import rank_place
from launch.supervise.slurm_step import StepRanks, srun_command, step_name, step_variables
from launch.supervise.supervisor import supervise
from launch.train.worker import check_devices
from tests.integration.host import wait_until

ATTEMPT = SweepPaths(Path("/shared/sweep")).run("eager-0123456789-r0").attempt(2)
LOOPBACK = Allocation("12_3", ("localhost",))


def test_srun_places_ranks_node_by_node_and_a_profile_has_the_last_word() -> None:
    command = srun_command(Step(2, 4, 8, "python3", ("--mpi=pmix", "--container-image=nemo")), ATTEMPT)
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=8", "--distribution=block"} < set(
        command
    )
    assert {"--overlap", "--kill-on-bad-exit=1", "--input=none", "--unbuffered", "--export=ALL"} < set(command)
    assert command[-7:-5] == ["--mpi=pmix", "--container-image=nemo"]
    assert command[-5:] == ["python3", "-u", "-m", "launch.supervise.slurm_rank", str(ATTEMPT.root)]


def test_a_rank_without_a_record_of_its_end_was_killed_once_the_step_has_ended(tmp_path: Path) -> None:
    attempt = SweepPaths(tmp_path).run("eager-0123456789-r0").attempt(1)
    attempt.logs.mkdir(parents=True)
    (tmp_path / "srun").write_text(f"#!/bin/sh\nread line < {tmp_path}/go\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    os.mkfifo(tmp_path / "go")
    step = StepRanks(attempt, Step(2, 1, 1, "python3"), LOOPBACK, {"PATH": str(tmp_path)}, 1)
    write_json(attempt.rank_exit(0), {"rank": 0, "code": 1, "time": 5.0})
    while_it_runs = step.exits()
    (tmp_path / "go").write_text("\n")
    wait_until(lambda: step.poll() == 1, 60, "srun to end")
    assert [one.rank for one in while_it_runs] == [0]
    assert [(one.rank, one.code, one.is_recorded) for one in step.exits()] == [(0, 1, True), (1, -9, False)]


@pytest.mark.parametrize(
    ("queue", "accounts"), [("PENDING BeginTime N/A", "RUNNING"), ("COMPLETING None N/A", "REQUEUED"), ("", "REQUEUED")]
)
def test_a_step_that_a_requeue_ended_has_no_outcome_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: str, accounts: str
) -> None:
    """srun may end before its supervisor is asked to, with any exit code. Seen with 0, after its node went down."""
    for program, answer in (("squeue", queue), ("sacct", accounts), ("srun", "")):
        (tmp_path / program).write_text(f"#!/bin/sh\necho {answer}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    attempt = SweepPaths(tmp_path).run("eager-0123456789-r0").attempt(1)
    attempt.logs.mkdir(parents=True)
    step = StepRanks(attempt, Step(1, 1, 1, "python3"), LOOPBACK, os.environ, 1)
    wait_until(lambda: step.poll() == 0, 60, "srun to end")
    evidence = step.ask_scheduler(Evidence("itself", exit_code=0, phases={0: "measure"}, exceptions=()))
    assert (evidence.ended_by, evidence.job_state) == ("job", "")


def test_the_node_is_that_of_the_torchrun_that_started_the_rank(tmp_path: Path) -> None:
    spec = RunSpec("command", placement=Placement(nodes=2, ranks_per_node=2), command=Command(launcher="torchrun"))
    attempt = SweepPaths(tmp_path).run("eager-0123456789-r0").attempt(1)
    attempt.logs.mkdir(parents=True)
    (tmp_path / "srun").symlink_to("/bin/false")
    nodes = Allocation("12_3", ("node1", "node2"))
    step = StepRanks(attempt, Step(2, 1, 2, "python3"), nodes, {"PATH": str(tmp_path)}, spec.ranks_per_task)
    wait_until(lambda: step.poll() == 1, 60, "srun to end")

    def found() -> list[str]:
        return [step.where(Diagnosis("FAILED", "measure", rank)) for rank in (0, 1, 2, 3, 4)]

    assert found() == ["node1", "node1", "node2", "node2", ""], "no exit is recorded, and rank 4 is none of the spec"
    for task in (0, 1):
        place = rank_place(
            {"SLURM_PROCID": str(task), "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"},
            spec.ranks_per_task,
        )
        rank = int(place["RANK"])
        write_json(attempt.rank_exit(rank), {"rank": rank, "code": 1, "time": 5.0 - task, "node": f"other{task}"})
    assert found() == ["other0", "other0", "other1", "other1", ""]
    assert [(one.rank, one.node) for one in step.exits()] == [(2, "other1"), (0, "other0")]


def test_a_step_is_named_by_its_attempt() -> None:
    assert step_name(ATTEMPT) == "eager-0123456789-r0.2"
    assert step_name(AttemptPaths(ATTEMPT.root.with_name("3"))) != step_name(ATTEMPT)


def test_ranks_inherit_nothing_that_speaks_of_the_supervisors_own_step() -> None:
    inherited = {
        "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_JOB_ID": "15", "SLURM_DISTRIBUTION": "cyclic", "HOME": "/home/a",
        "SLURM_MPI_TYPE": "pmix", "SLURMD_NODENAME": "node1", "SRUN_DEBUG": "3", "SUBMITIT_EXECUTOR": "slurm",
        "PMIX_RANK": "0", "PMIX_MCA_gds": "hash", "LAUNCH_PARENT_PID": "7", "CUDA_VISIBLE_DEVICES": "3", "NCCL_X": "1",
    }  # fmt: skip
    spec = RunSpec(environment={"NCCL_X": "run", "PYTHONPATH": "/more"})
    found = step_variables(spec, {"NCCL_X": "site", "NCCL_Y": "site"}, LOOPBACK, inherited)
    assert {name for name in found if name.startswith("SLURM")} == {"SLURM_CONF", "SLURM_JOB_ID"}
    assert not set(found) & {
        "SRUN_DEBUG",
        "SUBMITIT_EXECUTOR",
        "PMIX_RANK",
        "LAUNCH_PARENT_PID",
        "CUDA_VISIBLE_DEVICES",
    }
    assert (found["HOME"], found["PMIX_MCA_gds"]) == ("/home/a", "hash")
    assert (found["NCCL_X"], found["NCCL_Y"]) == ("run", "site"), "a run's own word goes before its site's"
    assert (found["MASTER_ADDR"], found["OMP_NUM_THREADS"]) == ("127.0.0.1", "1")
    root, more = found["PYTHONPATH"].split(":")
    assert (Path(root) / "launch" / "supervise" / "slurm_rank.py").exists() and more == "/more"


@pytest.mark.parametrize(("ranks", "visible"), [(8, 8), (2, 8), (1, 1), (8, 1)])
def test_a_rank_sees_a_gpu_for_each_rank_of_its_node_or_its_own(ranks: int, visible: int) -> None:
    check_devices(ranks, visible)


@pytest.mark.parametrize(("ranks", "visible"), [(8, 4), (4, 2), (2, 0)])
def test_a_rank_that_sees_too_few_gpus_says_both_numbers(ranks: int, visible: int) -> None:
    with pytest.raises(EnvironmentFault, match=f"^{ranks} ranks run on this node, but each sees {visible} GPUs"):
        check_devices(ranks, visible)


def test_a_free_port_is_free_and_not_one_of_the_kernels_own() -> None:
    port = free_port()
    assert PORTS[0] <= port < PORTS[1]
    with socket.create_server(("", port)) as taken:
        assert taken.getsockname()[1] == port


@pytest.mark.parametrize(
    ("counts", "node", "here"),
    [("2(x2)", 0, 2), ("2(x2)", 1, 2), ("4,2(x3),1", 3, 2), ("4,2(x3),1", 4, 1), ("8", 0, 8)],
)
def test_tasks_of_a_node_are_counted_where_slurm_does_not_say_them(counts: str, node: int, here: int) -> None:
    said = {"SLURM_PROCID": "5", "SLURM_NTASKS": "11", "SLURM_LOCALID": "1", "SLURM_NODEID": str(node)}
    place = rank_place(said | {"SLURM_STEP_TASKS_PER_NODE": counts}, 1)
    assert place == {"RANK": "5", "WORLD_SIZE": "11", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(here)}
    assert rank_place(said | {"SLURM_NTASKS_PER_NODE": "4"}, 1)["LOCAL_WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("RUNNING                       None              N/A", "RUNNING"),
        ("RUNNING                       None              2026-01-02T03:04:05", "PREEMPTED"),
        ("PENDING                       BeginTime         2026-01-02T03:04:05", "PENDING"),
        ("COMPLETING                    TimeLimit         N/A", "TIMEOUT"),
        ("COMPLETING                    NodeDown          N/A", "NODE_FAIL"),
        ("COMPLETING                    None              N/A", "COMPLETING"),
        ("CANCELLED                     None              N/A", "CANCELLED"),
        ("", None),
    ],
)
def test_what_squeue_says_of_a_job(line: str, state: str | None) -> None:
    """The lines come from Slurm 22.05. A time is that of a preemption, after which the job has a grace time."""
    assert queue_state(line) == state


@pytest.mark.parametrize(
    ("row", "words"),
    [
        # Rows of Slurm 22.05. In the first, one of four tasks took all memory. In the second, the two tasks of each
        # node did so together.
        (("CANCELLED by 0", "334556K", "2", "cpu=00:00:00,mem=447520K", "cpu=4,mem=409600K,node=2"), "327 MB of host memory on a node, of 200 MB"),
        (("CANCELLED by 0", "180948K", "2", "cpu=00:00:00,mem=633576K", "cpu=4,mem=409600K,node=2"), "309 MB of host memory on a node, of 200 MB"),
        (("CANCELLED by 0", "100948K", "2", "cpu=00:00:00,mem=333576K", "cpu=4,mem=409600K,node=2"), ""),
        (("OUT_OF_MEMORY", "", "1", "", "cpu=4,mem=409600K,node=1"), "than the job has"),
        (("CANCELLED by 0", "", "", "", ""), ""),
        (("CANCELLED by 0", "180948K", "1", "mem=180948K", "cpu=4,node=1"), ""),
    ],
)  # fmt: skip
def test_memory_that_a_step_was_ended_for(row: tuple[str, str, str, str, str], words: str) -> None:
    found = parse_step_end(*row)
    assert words in found.over_memory and bool(words) == bool(found.over_memory)
    assert found.cancelled == (not words)


@pytest.mark.parametrize("state", ["FAILED", "COMPLETED", "NODE_FAIL", "CANCELLED"])
def test_a_step_that_nobody_cancelled(state: str) -> None:
    assert parse_step_end(state, "100948K", "2", "mem=333576K", "cpu=4,mem=409600K,node=2") == StepEnd()


CANCELLED = "slurmstepd-node1: error: *** STEP 27.1 ON node1 CANCELLED AT 2026-11-29T16:47:56 ***"
KILLED = "srun: error: node1: task 0: Killed"


@pytest.mark.parametrize(
    ("lines", "cancelled"),
    [
        ([CANCELLED, KILLED, "srun: error: node2: task 1: Exited with exit code 1"], True),
        ([CANCELLED], True),
        # After a task was killed, srun itself cancels the others.
        ([KILLED, CANCELLED], False),
        (["srun: error: node[1-2]: tasks 0-1: Killed", CANCELLED], False),
        ([f"{CANCELLED.removesuffix(' ***')} DUE TO TIME LIMIT ***", KILLED], False),
        ([KILLED], False),
    ],
)
def test_who_ended_a_step_by_the_order_of_its_lines(lines: list[str], cancelled: bool) -> None:
    """Slurm 22.05. Accounting said FAILED of the first one."""
    assert (
        cancelled_first("\n".join(["srun: Job step aborted: Waiting up to 10 seconds for job step to finish.", *lines]))
        is cancelled
    )


def test_a_bundle_of_a_cluster_is_refused_where_there_is_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    order = BundleOrder("bundle", "workload", (("run-r0", 1),), Limits(), 0, (), step=Step(1, 1, 1, "python3"))
    write_json(BundlePaths(tmp_path).order, order)
    with pytest.raises(SystemExit, match="needs a Slurm job, but this process is not in one"):
        supervise(str(tmp_path))
    assert not BundlePaths(tmp_path).lock.exists()


def test_a_damaged_line_keeps_no_bundle_from_starting_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    bundle = BundlePaths(tmp_path)
    write_json(bundle.order, BundleOrder("bundle", "workload", (), Limits(), 0, ()))
    bundle.allocations.write_text('{"allocation": 1}\n\0\0\n{"allo')
    supervise(str(tmp_path))
    assert '{"allocation": 3, ' in bundle.allocations.read_text().splitlines()[-1]


@pytest.mark.parametrize("content", ["", "null", "[]", "{}", "stop, please"])
def test_a_cancellation_that_lists_no_runs_is_of_all(tmp_path: Path, content: str) -> None:
    assert read_cancellation(BundlePaths(tmp_path)) is None
    (tmp_path / "cancel").write_text(content)
    found = read_cancellation(BundlePaths(tmp_path))
    assert found is not None and found.covers("a")


def test_a_cancellation_is_of_the_runs_that_it_lists(tmp_path: Path) -> None:
    (tmp_path / "cancel").write_text('["a", "b"]')
    found = read_cancellation(BundlePaths(tmp_path))
    assert found is not None and [found.covers(run_id) for run_id in "abc"] == [True, True, False]


@pytest.mark.parametrize(("seconds", "why"), [(300.0, "exit code 1; "), (0.0, "no answer in 0 s")])
def test_a_bundle_goes_on_where_its_verdicts_cannot_be_judged(
    seconds: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is no plan to judge by, and no spec to run."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(child_process, "JUDGE_SECONDS", seconds)
    bundle = SweepPaths(tmp_path).bundle("bundle")
    write_json(bundle.order, BundleOrder("bundle", "w", (("run-r0", 1),), Limits(), 0, (), looks=("run-r0",)))
    supervise(bundle.path)
    assert f"it is unknown whether verdicts are settled ({why}" in capfd.readouterr().err
    assert seconds == 0 or "plan.json" in bundle.early_stop_log.read_text()
    assert bundle.sweep.run("run-r0").attempt(1).has_ended
