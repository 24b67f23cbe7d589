"""Test submissions on disk, the arguments of sbatch, and a submission that an earlier command left open."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.common.atomic_files import read_json, write_json
from launch.contract.bundle import BundleOrder, EarlyStop
from launch.contract.cancellation import read_cancellation
from launch.contract.paths import SweepPaths
from launch.contract.plan import Limits
from orchestrator.errors import SystemFault
from orchestrator.submit import slurm_queue
from orchestrator.submit.job_arrays import Array
from orchestrator.submit.sbatch import BatchJob, Refused, batch_script, submit_bundles
from orchestrator.submit.slurm_queue import poll_jobs
from orchestrator.sweeps.slurm_jobs import JobMonitor
from orchestrator.sweeps.store import write_orders
from orchestrator.sweeps.submissions import Submission, read_submissions, write_submission
from orchestrator.targets.job_request import JobRequest
from orchestrator.targets.profile import Profile
from tests.integration.host import wait_until

STORE = SweepPaths(Path("/store/my sweep"))
REQUEST = JobRequest(nodes=2, ranks_per_node=4, cpus_per_rank=3, gpus_per_node=4, minutes=90)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepPaths:
    return SweepPaths(tmp_path / "sweep")


def submission(token: str = "token", job_id: str | None = None, **fields: Any) -> Submission:
    made = Submission(token, token, ("one", "two"), time.time(), socket.gethostname(), job_id)
    return replace(made, **fields)


# --- on disk --------------------------------------------------------------------------------------------------------


def test_submissions_are_read_back_in_their_order_whatever_the_clock_said(sweep: SweepPaths) -> None:
    assert read_submissions(sweep) == []
    late, early = submission("a", "12", time=1.0, number=2), submission("b", time=2.0, number=1)
    for each in (late, early):
        write_submission(sweep, each)
    assert read_submissions(sweep) == [early, late]
    assert late.job_ids() == ["12_0", "12_1"] and early.job_ids() == []
    assert late.job_of("two") == "12_1"
    assert replace(late, bundles=("one",)).job_ids() == ["12"]


@pytest.mark.parametrize("content", ['{"token": "a"', "[]", '{"token": "a"}', '{"bundles": []}'])
def test_a_damaged_submission_is_said_and_never_passed_over(sweep: SweepPaths, content: str) -> None:
    sweep.submissions.mkdir(parents=True)
    (sweep.submissions / "a.json").write_text(content)
    with pytest.raises(SystemFault, match=r"a\.json: not a submission of this version"):
        read_submissions(sweep)


# --- what sbatch is given -------------------------------------------------------------------------------------------


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a stand-in for srun, because submitit writes scripts only if it finds one."""
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def directives(
    profile: Profile,
    count: int = 1,
    request: JobRequest = REQUEST,
    chain: int | None = None,
    exclude: Sequence[str] = (),
) -> Mapping[str, str]:
    """Return the options of the batch script, and its last lines under "command" and "setup"."""
    array = Array(request, tuple(map(str, range(count))), chain)
    text = batch_script(BatchJob(STORE, STORE.root / "token", array, profile, "name", exclude))
    words = [line.removeprefix("#SBATCH --").partition("=") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert len({name for name, _, _ in words}) == len(words), "an option given twice"
    (command,) = [line for line in text.splitlines() if line.startswith("srun ")]
    setup = text.partition("# setup\n")[2].partition("\n\n# command")[0]
    return {name: value for name, _, value in words} | {"command": command, "setup": setup}


@pytest.mark.usefixtures("srun")
def test_an_empty_profile_leaves_every_choice_to_slurm() -> None:
    found = directives(Profile())
    assert {name: found[name] for name in ("nodes", "ntasks-per-node", "cpus-per-task", "gres", "time", "job-name")} == {
        "nodes": "2", "ntasks-per-node": "4", "cpus-per-task": "3", "gres": "gpu:4", "time": "90", "job-name": "name",
    }  # fmt: skip
    assert found["no-requeue"] == ""
    chosen = {"partition", "account", "qos", "mem", "exclusive", "wckey", "dependency", "exclude", "array", "requeue"}
    assert not chosen & found.keys()


@pytest.mark.usefixtures("srun")
def test_the_supervisor_is_one_process_beside_which_runs_find_room() -> None:
    words = directives(Profile())["command"].split()
    assert {"--nodes=1", "--ntasks=1", "--overlap", "--relative=0", "--cpus-per-task=1", "--mpi=none"} <= set(words)


@pytest.mark.usefixtures("srun")
@pytest.mark.parametrize(
    ("profile", "said"),
    [
        (Profile(gpus="gres", gpu_type="a100"), {"gres": "gpu:a100:4"}),
        (Profile(gpus="gpus_per_node"), {"gpus-per-node": "4"}),
        (Profile(gpus="gpus_per_node", gpu_type="h200"), {"gpus-per-node": "h200:4"}),
        (Profile(wckey="key", exclusive=True, mem="0"), {"wckey": "key", "exclusive": "", "mem": "0"}),
        (Profile(reservation="r", sbatch={"mail-type": "END", "comment": "x y", "spread-job": ""}),
         {"reservation": "r", "mail-type": "END", "comment": "'x y'", "spread-job": ""}),
    ],
)  # fmt: skip
def test_what_a_profile_says_reaches_sbatch(profile: Profile, said: Mapping[str, str]) -> None:
    found = directives(profile)
    assert {name: found.get(name) for name in said} == said
    assert ("gres" in found) == ("gres" in said or "gpus-per-node" not in said)


@pytest.mark.usefixtures("srun")
def test_whole_nodes_and_cpus_are_asked_for_without_gpus() -> None:
    for found in (directives(Profile(gpus="none")), directives(Profile(), request=replace(REQUEST, gpus_per_node=0))):
        assert not {"gres", "gpus-per-node"} & found.keys()


@pytest.mark.usefixtures("srun")
def test_a_chain_is_an_array_of_one_at_a_time_behind_others_of_its_name() -> None:
    assert directives(Profile(), 7)["array"] == "0-6%7"
    chain = directives(Profile(), 7, chain=0)
    assert (chain["array"], chain["dependency"]) == ("0-6%1", "singleton")
    assert directives(Profile(), 1, chain=0)["dependency"] == "singleton"


@pytest.mark.usefixtures("srun")
def test_failed_nodes_are_left_aside_beside_those_of_the_profile() -> None:
    assert directives(Profile(sbatch={"exclude": "node[7-9]"}), exclude=["node2"])["exclude"] == "'node2,node[7-9]'"


@pytest.mark.usefixtures("srun")
def test_jobs_find_this_program_after_what_the_site_sets_up(tmp_path: Path) -> None:
    """This holds in any folder, and for any PYTHONPATH that the site's own lines set."""
    for line in ("true", "export PYTHONPATH=/somewhere", "unset PYTHONPATH"):
        setup = directives(Profile(setup=(line,)))["setup"]
        command = f"{setup}\n{sys.executable} -c 'import launch.supervise.supervisor, sys; print(sys.path)'"
        done = subprocess.run(["bash", "-euc", command], cwd=tmp_path, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert ("/somewhere" in done.stdout) == ("somewhere" in line)


@pytest.mark.usefixtures("srun")
@pytest.mark.parametrize(("task", "bundle"), [(None, "one"), ("0", "one"), ("1", "$(id) `id`"), ("2", "three")])
def test_each_element_of_an_array_supervises_its_own_bundle(tmp_path: Path, task: str | None, bundle: str) -> None:
    """This holds even if the site's lines make bash reject unset variables."""
    sweep = SweepPaths(tmp_path / 'my "$sweep"')
    array = Array(REQUEST, ("one", "$(id) `id`", "three"))
    profile = Profile(setup=("set -eu",))
    (tmp_path / "srun").write_text('#!/bin/sh\nfor last in "$@"; do :; done; echo "$last"\n')
    script = batch_script(BatchJob(sweep, tmp_path, array, profile, "name"))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    variables = inherited | ({} if task is None else {"SLURM_ARRAY_TASK_ID": task})
    done = subprocess.run(["bash", "-c", script], env=variables, text=True, capture_output=True)
    assert done.stdout == f"{sweep.bundle(bundle).root}\n", done.stderr


@pytest.mark.usefixtures("srun")
@pytest.mark.parametrize("around", [{}, {"SLURM_JOB_ID": "7"}])
def test_a_job_inherits_no_options_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, around: Mapping[str, str]
) -> None:
    """Slurm would end the supervisor after SLURM_TIMELIMIT, and the run would be CANCELLED by nobody."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nenv > {tmp_path}/seen; echo Submitted batch job 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "a token", "SLURM_CLUSTERS": "big", "SBATCH_QOS": "low"}
    ours = {"SLURM_TIMELIMIT": "1", "SLURM_EXCLUSIVE": "user", "SBATCH_TIMELIMIT": "1", "SRUN_CPUS_PER_TASK": "3"}
    for name, value in {**kept, **ours, **around}.items():
        monkeypatch.setenv(name, value)
    assert submit_bundles(BatchJob(STORE, tmp_path / "own", Array(REQUEST, ("one",)), Profile(), "name")) == "7"
    seen = dict(line.partition("=")[::2] for line in (tmp_path / "seen").read_text().splitlines())
    assert {name: seen.get(name) for name in kept} == kept
    assert not {*ours, *around} & seen.keys()
    assert os.environ["SLURM_TIMELIMIT"] == "1"


SILENCES = (
    "Message receive failure", "Protocol authentication error", "Received zero length message",
    "Socket timed out on send/recv operation", "Unexpected missing socket error", "Unexpected message received",
    "Zero Bytes were transmitted or received", "Batch job submission failed: Transport endpoint is not connected",
)  # fmt: skip
FULL = "Slurm temporarily unable to accept job, sleeping and retrying"


@pytest.mark.usefixtures("srun")
@pytest.mark.parametrize(
    ("script", "certain", "words"),
    [
        ("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1", True, "Invalid account"),
        ("echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1", True, "connect"),
        *((f"echo 'sbatch: error: {silence}' >&2; exit 1", False, silence) for silence in SILENCES),
        # It would ask again for two minutes. It may be a child of a site's own sbatch.
        (f"echo 'sbatch: error: {FULL}' >&2; sleep 1000; exit 1", True, FULL),
        ("kill -9 $$", False, "signal 9|SIGKILL"),
        ("echo 'Submitted to the queue'", False, "Submitted to the queue"),
    ],
)
def test_a_refusal_is_told_from_a_silence(
    sweep: SweepPaths, tmp_path: Path, script: str, certain: bool, words: str
) -> None:
    """After a rejection there is no job. After any other failure there may be one."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(Refused, match=words) as refused:
        submit_bundles(BatchJob(sweep, tmp_path / "own", Array(REQUEST, ("one",)), Profile(), "name"))
    assert refused.value.certain == certain


# --- left open by an earlier command --------------------------------------------------------------------------------


class Slurm(JobMonitor):
    """A Slurm that finds given jobs under a name."""

    def __init__(self, *found: str) -> None:
        super().__init__()
        self.found = found
        self.asked_at: list[float] = []

    def find(self, name: str, since: float) -> tuple[str, ...]:
        self.asked_at.append(time.monotonic())
        return self.found


def test_a_job_that_slurm_knows_is_adopted(sweep: SweepPaths) -> None:
    left = submission(name="chain")
    write_submission(sweep, submission("before", "11", name="chain", number=-1))
    write_submission(sweep, left)
    poll_jobs(sweep, Slurm("11", "12"))
    assert [s.job_id for s in read_submissions(sweep)] == ["11", "12"]


def test_a_job_is_adopted_whose_id_a_forgotten_job_had_before(sweep: SweepPaths) -> None:
    write_submission(sweep, submission("forgotten", "12", name="forgotten", number=-1))
    write_submission(sweep, submission(name="left"))
    poll_jobs(sweep, Slurm("12"))
    assert [s.job_id for s in read_submissions(sweep)] == ["12", "12"]


@pytest.mark.parametrize("ago", [100.0, -100.0], ids=["clock set forward", "clock set back"])
def test_a_submission_of_which_slurm_has_no_job_is_forgotten_once_none_can_arrive(
    sweep: SweepPaths, monkeypatch: pytest.MonkeyPatch, ago: float
) -> None:
    """This holds on the same host, and on a host whose sbatch cannot be seen, whatever their clocks show."""
    monkeypatch.setattr(slurm_queue, "ARRIVAL_SECONDS", 0.1)
    monkeypatch.setattr(slurm_queue, "SBATCH_SECONDS", 0.2)
    monkeypatch.setattr(slurm_queue, "FIND_SECONDS", 0.05)
    for host, seconds in ((socket.gethostname(), 0.1), ("another", 0.2)):
        write_submission(sweep, submission(host=host, time=time.time() - ago))
        slurm, begun = Slurm(), time.monotonic()
        poll_jobs(sweep, slurm)
        assert read_submissions(sweep) == []
        assert slurm.asked_at[-1] - begun >= seconds


def test_an_sbatch_that_is_still_at_work_is_waited_for(sweep: SweepPaths) -> None:
    left = submission(time=time.time() - 100)
    write_submission(sweep, left)
    left.folder(sweep).mkdir(parents=True)
    script = left.folder(sweep) / ".submission_file_1.sh"
    with subprocess.Popen([sys.executable, "-c", "input()", str(script)], stdin=subprocess.PIPE) as sbatch:
        assert sbatch.stdin is not None
        wait_until(lambda: str(script).encode() in Path(f"/proc/{sbatch.pid}/cmdline").read_bytes(), 60, "its start")
        threading.Timer(1.0, sbatch.stdin.close).start()
        poll_jobs(sweep, Slurm("12"))
        # It has no command line from the moment it ends, and an exit code only later.
        assert sbatch.stdin.closed and sbatch.wait(60) is not None
    assert read_submissions(sweep)[0].job_id == "12"


# --- orders ---------------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.sampled_from("abcd"), min_size=1), st.none() | st.sets(st.sampled_from("abcd")))
def test_an_order_lifts_the_cancellation_of_its_own_runs_alone(
    sweep: SweepPaths, ordered: set[str], cancelled: set[str] | None
) -> None:
    bundle = sweep.bundle("b")

    def order(runs: set[str]) -> BundleOrder:
        return BundleOrder("b", "w", tuple((run, 1) for run in sorted(runs)), Limits(), 0, ())

    write_orders(sweep, [order(set("abcd"))])
    write_json(bundle.cancel, None if cancelled is None else sorted(cancelled))
    write_orders(sweep, [order(ordered)])
    write_orders(sweep, [order(ordered)])
    assert dict(read_json(bundle.order)["schedule"]).keys() == ordered
    left = read_cancellation(bundle)
    everything = not cancelled  # An empty list chooses no jobs.
    still = set("abcd") - ordered if everything else (cancelled or set()) - ordered
    assert {run for run in "abcd" if left is not None and left.covers(run)} == still


@pytest.mark.parametrize("everything", [False, True])
def test_an_order_beside_an_attempt_that_runs_leaves_it_cancelled(sweep: SweepPaths, everything: bool) -> None:
    """`resume` comes between `cancel` and the end of the attempt, and begins another run."""
    bundle, both = sweep.bundle("b"), BundleOrder("b", "w", (("failed", 2), ("runs", 1)), Limits(), 0, ())
    write_orders(sweep, [both])
    sweep.run("runs").attempt(1).root.mkdir(parents=True)
    write_json(bundle.cancel, None if everything else ["runs"])
    write_orders(sweep, [both])
    left = read_cancellation(bundle)
    assert left is not None and left.covers("runs") and not left.covers("failed")


def test_an_order_of_runs_that_were_not_needed_lifts_the_early_stop(sweep: SweepPaths) -> None:
    bundle = sweep.bundle("b")
    write_json(bundle.early_stop, EarlyStop(2, 6, ("c", "d")))
    for runs, stops in (("ab", True), ("abc", False)):
        write_orders(sweep, [BundleOrder("b", "w", tuple((run, 1) for run in runs), Limits(), 0, ())])
        assert bundle.early_stop.exists() == stops
