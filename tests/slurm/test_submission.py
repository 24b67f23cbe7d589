"""Test a sweep through Slurm, from its recipe to its report: each bundle is submitted once, whatever process dies,
never more run at a time than the limits allow, and cancelling leaves nothing."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from typing import Any

import pytest

from launch.common.file_lock import holder
from launch.contract.exit_codes import ExitCode
from launch.slurm.job_states import stage_of
from tests.integration.fork_server import SERVER
from tests.integration.host import ROOT, recipe, wait_until
from tests.slurm.site import Site

pytestmark = pytest.mark.slurm

SHORT = 40
LONG = 10**6
"""The steps of a run that ends soon, and of one that a test must end."""
STATE_SAVED_WITHIN = 10.0
"""Seconds. slurmctld saves its state every five seconds."""


def some(name: str, bundles: int, steps: int = SHORT, **fields: Any) -> dict[str, Any]:
    """Return a recipe of this number of bundles. Runs with different seeds belong to different workloads."""
    return recipe(name, steps=steps, sweep={"grid": {"training.seed": list(range(bundles))}}, **fields)


def arrays(jobs: Collection[str]) -> set[str]:
    """Return the ids that sbatch gave."""
    return {job.partition("_")[0] for job in jobs}


def test_a_recipe_becomes_a_report_by_one_array(site: Site) -> None:
    done = site.run("sweep", site.write(some("three", 3)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(map(tuple, site.attempts("three").values())) == {(1,)}
    assert set(site.states("three").values()) == {"COMPLETED"}
    ended = site.accounts("State")
    (array,) = arrays(ended)
    assert ended == {f"{array}_{place}": "COMPLETED" for place in range(3)}
    (submission,) = site.sweep("three").submissions.iterdir()
    assert json.loads(submission.read_text())["job_id"] == array
    # No cell is graphed, so nothing was validated. The command's option says that this is no failure.
    assert json.loads((site.sweep("three").report / "report.json").read_text())["exit_code"] == 4
    site.wait_for_nobody()

    again = site.run("sweep", str(site.folder / "three.yaml"))
    assert again.returncode == 0 and "3 on disk" in again.stdout and "to start" not in again.stdout
    assert arrays(site.accounts("State")) == {array}


def test_limits_hold_when_nobody_watches_and_the_next_command_adopts_what_goes_on(site: Site) -> None:
    site.profile(max_jobs=2)
    path = site.write(some("chains", 5))
    with site.full():
        assert site.run("sweep", path, "--no-wait").returncode == 0
        assert set(site.states("chains").values()) == {"QUEUED"}
        other = site.run("sweep", path, "repeats=2")
        assert other.returncode == 1 and "is already running with another plan" in other.stderr

        watching = site.start("sweep", path)
        assert watching.stdout is not None
        assert any("5 already running or waiting, adopted" in watching.stdout.readline() for _ in range(2))
        wait_until(lambda: holder(site.sweep("chains").order_lock) is None, 60, "the command to follow")
        time.sleep(1)
        watching.send_signal(signal.SIGINT)
        out, _ = watching.communicate(timeout=120)
        assert watching.returncode == 130 and "keeps running without this command" in out
    done = site.run("sweep", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(map(tuple, site.attempts("chains").values())) == {(1,)}

    names = site.accounts("JobName")
    assert len(names) == 5 and len(set(names.values())) == len(arrays(names)) == 2
    spans = zip(map(int, site.accounts("Start").values()), map(int, site.accounts("End").values()), strict=True)
    moments = sorted((second, change) for start, end in spans for second, change in ((start, 1), (end, -1)))
    running = [sum(change for _, change in moments[: place + 1]) for place in range(len(moments))]
    assert max(running) == 2, moments


KILL = "kill -9 $(sed -n 's/^PPid:.//p' /proc/$PPID/status)"
"""Kill the command. The shell's own parent is sbatch_once."""
KILLED = {
    "before sbatch": f"{KILL}; exit 1",
    "while sbatch is at work": f'{KILL}; sleep 3; exec $REAL "$@"',
    "when sbatch has answered": f'$REAL "$@"; {KILL}',
}


@pytest.mark.parametrize(
    ("moment", "limits"), [*((moment, {}) for moment in KILLED), ("when sbatch has answered", {"max_jobs": 1})]
)
def test_a_command_killed_at_sbatch_loses_nothing_and_submits_nothing_twice(
    site: Site, moment: str, limits: dict[str, int]
) -> None:
    site.profile(**limits)
    site.program("sbatch", KILLED[moment])
    path = site.write(some("killed", 2))
    first = site.start("sweep", path)
    first.communicate(timeout=120)
    assert first.returncode == -signal.SIGKILL
    (submission,) = site.sweep("killed").submissions.iterdir()
    assert json.loads(submission.read_text())["job_id"] is None

    site.without_program("sbatch")
    done = site.run("sweep", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(map(tuple, site.attempts("killed").values())) == {(1,)}
    assert set(site.states("killed").values()) == {"COMPLETED"}
    assert len(arrays(site.accounts("State"))) == 1
    site.wait_for_nobody()


def test_a_job_needs_no_command_and_unpickles_nothing(site: Site) -> None:
    """The command is killed before it can record the job, and no other command follows."""
    site.program("sbatch", KILLED["when sbatch has answered"])
    path = site.write(some("orphan", 2))
    first = site.start("sweep", path)
    first.communicate(timeout=120)
    assert first.returncode == -signal.SIGKILL
    site.wait_until_over()
    outcomes = [json.loads(path.read_text())["outcome"] for path in site.sweep("orphan").root.rglob("outcome.json")]
    assert outcomes == ["COMPLETED", "COMPLETED"]
    assert not list(site.store.rglob("*.pkl*"))


@pytest.mark.parametrize("words", ["Socket timed out on send/recv operation", "the site's own program has failed"])
def test_a_job_that_sbatch_submitted_before_it_failed_is_not_submitted_again(site: Site, words: str) -> None:
    site.program("sbatch", f'$REAL "$@"; echo "sbatch: error: {words}" >&2; exit 1')
    done = site.run("sweep", site.write(some("failed", 2)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(map(tuple, site.attempts("failed").values())) == {(1,)}
    assert len(arrays(site.accounts("State"))) == len(site.job_ids("failed")) == 1


def test_what_sbatch_refuses_is_one_message_and_leaves_no_submission(site: Site) -> None:
    site.profile(reservation="nowhere")
    path = site.write(some("refused", 2))
    refused = site.run("sweep", path)
    assert refused.returncode == 1
    assert "profile default" in refused.stderr and "Requested reservation is invalid" in refused.stderr
    assert not list(site.sweep("refused").submissions.iterdir())
    assert set(site.states("refused").values()) == {"PLANNED"}


def test_store_and_checkout_may_be_called_anything_that_a_shell_would_read(site: Site) -> None:
    site.store = site.folder / 'it\'s "$HOME" `id` & co; #1'
    checkout = site.folder / "my 'check' $out"
    for package in ("analysis", "launch", "orchestrator"):
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    site.environment["PYTHONPATH"] = str(checkout)
    del site.environment[SERVER]  # Its forks have imported this checkout.
    done = site.run("sweep", site.write(some("quoted", 2)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(site.states("quoted").values()) == {"COMPLETED"}
    (script,) = site.sweep("quoted").root.glob("submitit/*/*_submission.sh")
    assert shlex.quote(str(checkout)) in script.read_text()


@pytest.mark.parametrize("folder", ["100%u", "back\\slash"])
def test_a_store_whose_name_sbatch_would_take_for_a_pattern_is_refused(site: Site, folder: str) -> None:
    site.store = site.folder / folder
    refused = site.run("sweep", site.write(some("pattern", 1)))
    assert refused.returncode == 1
    assert (
        re.search(r"/pattern contains [%\\], which sbatch ", refused.stderr)
        and "choose another folder" in refused.stderr
    )
    assert set(site.states("pattern").values()) == {"PLANNED"} and site.queue() == {}


def test_nothing_is_submitted_where_slurm_does_not_say_what_runs(site: Site) -> None:
    """A submission is not repeated blindly if nobody knows whether Slurm has it."""
    site.program("sbatch", KILLED["when sbatch has answered"])
    path = site.write(some("silent", 1, LONG))
    site.start("sweep", path).communicate(timeout=120)
    site.without_program("sbatch")
    site.program("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    for command in (["sweep", path], ["cancel", "silent"]):
        silent = site.run(*command)
        assert silent.returncode == 2 and "Unable to contact" in silent.stderr and "ry again" in silent.stderr
    assert len(site.queue()) == 1


def test_a_controller_killed_under_a_load_of_submissions_loses_none_and_makes_none_twice(site: Site) -> None:
    """The controller forgets the jobs of its last seconds, although sbatch has reported them, and gives their ids
    again. There is no accounting that would know them. Another job holds all nodes until the controller is back."""
    site.program("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    site.program("sbatch", f'until test -e {site.folder}/go; do sleep 0.02; done; exec $REAL "$@"')
    names = ["one", "two", "three"]
    with site.full() as other:
        saved = time.monotonic() + STATE_SAVED_WITHIN
        commands = {name: site.start("sweep", site.write(some(name, 2))) for name in names}
        taken = [site.sweep(name).submissions for name in names]
        wait_until(lambda: all(any(folder.glob("*.json")) for folder in taken), 60, "sweeps about to submit")
        time.sleep(max(0.0, saved - time.monotonic()))
        state = site.cluster.folder / "state"
        shutil.copytree(state, site.folder / "state")
        (site.folder / "go").touch()
        wait_until(lambda: any(site.job_ids(name) for name in names), 60, "a job's id")
        with site.cluster.without("slurmctld"):
            # It may have saved its state a moment ago.
            shutil.rmtree(state)
            shutil.copytree(site.folder / "state", state)
        wait_until(lambda: other in site.queue_if_any(), 60, "the controller to be back")
    for name, command in commands.items():
        out, err = command.communicate(timeout=300)
        if command.returncode != 0:
            assert command.returncode == 2 and "Run the command again" in err, out + err
            done = site.run("sweep", str(site.folder / f"{name}.yaml"))
            assert done.returncode == 0, done.stdout + done.stderr
    for name in names:
        assert set(site.states(name).values()) == {"COMPLETED"}
        assert set(map(tuple, site.attempts(name).values())) == {(1,)}
        assert len(site.job_ids(name)) <= 2, "a job that got the id of a forgotten one is known"
    assert site.queue() == {}
    site.wait_for_nobody()


def test_a_command_inside_a_job_does_not_hand_that_job_on(site: Site) -> None:
    """Of the job's variables, SBATCH_GPUS_PER_NODE would make sbatch reject the new job, and SLURM_GPUS_PER_NODE would
    make Slurm reject its steps."""
    arguments = ["-m", "orchestrator", "sweep", site.write(some("inside", 1)), "--store", str(site.store),
                 "--executor", "slurm", "--no-wait"]  # fmt: skip
    srun = ["srun", "--ntasks=1", "--cpus-per-task=3", "--gpus-per-node=2", "--mem=500", sys.executable, *arguments]
    environment = site.environment | {"SBATCH_GPUS_PER_NODE": "99"}
    done = subprocess.run(srun, env=environment, cwd=site.folder, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    site.wait_until_over()
    assert list(site.accounts("ReqCPUS").values()) == ["1"]
    assert set(site.states("inside").values()) == {"COMPLETED"}


def test_cancel_ends_what_runs_what_waits_and_what_is_held(site: Site) -> None:
    site.profile(max_jobs=1)
    path = site.write(some("long", 3, LONG))
    assert site.run("sweep", path, "--no-wait").returncode == 0
    first, second, third = site.states("long")
    site.wait_for_step("long", first)
    (held,) = (job for job in site.queue() if job.endswith("_1"))
    site.cluster.run("scontrol", "hold", held)
    assert site.states("long") == {first: "RUNNING", second: "QUEUED", third: "QUEUED"}

    # These are settings of a user for scancel by hand: ask first, and cancel no jobs but these.
    site.environment |= {"SCANCEL_INTERACTIVE": "true", "SCANCEL_NAME": "another", "SCANCEL_PARTITION": "nowhere"}
    cancelled = json.loads(site.run("cancel", "long", "--json").stdout)
    assert cancelled["cancelled"] == sorted([first, second, third])
    assert site.states("long") == dict.fromkeys([first, second, third], "CANCELLED")
    assert site.queue() == {}
    site.wait_for_nobody(0.1)
    assert "no run of long runs or waits" in site.run("cancel", "long").stdout
    assert site.outcome("long", first).message == "cancelled while it ran"
    assert "to start" not in site.run("sweep", path).stdout, "what was cancelled is not begun unasked"


def test_chosen_runs_are_cancelled_and_the_others_go_on(site: Site) -> None:
    """There are three bundles of two runs, and one job at a time. The test cancels both runs of the second bundle, the
    last run of the third, and both runs of the first, which is running."""
    site.profile(max_jobs=1)
    content = recipe("some", steps=LONG, repeats=2, sweep={"points": [
        {"training.seed": 1}, {"training.seed": 2}, {"training.seed": 3, "training.steps": SHORT},
    ]})  # fmt: skip
    assert site.run("sweep", site.write(content), "--no-wait").returncode == 0
    running, behind, waiting, too, short, last = site.states("some")
    site.wait_for_step("some", running)
    unclear = site.run("cancel", "some", "nobody", "eager")
    assert (
        unclear.returncode == 1
        and "begins with 'nobody'" in unclear.stderr
        and "matches several runs" in unclear.stderr
    )

    assert site.run("cancel", "some", waiting, too).returncode == 0
    assert sorted(stage_of(state) for state in site.queue().values()) == ["runs", "waits"]
    assert site.run("cancel", "some", last).returncode == 0
    assert site.run("cancel", "some", behind[:-1] + "1").returncode == 0
    assert site.states("some")[running] == "RUNNING"
    assert site.run("cancel", "some", running).returncode == 0
    wait_until(lambda: site.has_ended("some", short), 60, "the run that nobody cancelled")
    site.wait_until_over()
    cancelled = dict.fromkeys([running, behind, waiting, too, last], "CANCELLED")
    assert site.states("some") == cancelled | {short: "COMPLETED"}
    for run in (behind, waiting, too, last):
        assert site.outcome("some", run).message == "cancelled before it began"


def test_resume_makes_what_was_cancelled(site: Site) -> None:
    path = site.write(recipe("again", repeats=2))
    with site.held():
        assert site.run("sweep", path, "--no-wait").returncode == 0
        first, second = site.states("again")
        site.wait_for_step("again", first)
        assert site.run("cancel", "again").returncode == 0
    resumed = site.run("resume", "again")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert site.states("again") == {first: "COMPLETED", second: "COMPLETED"}
    assert site.attempts("again") == {first: [1, 2], second: [1, 2]}
    assert len(site.accounts("State")) == 2
    site.wait_for_nobody()


def test_a_job_ends_once_its_verdicts_are_final_and_nothing_of_it_is_submitted_again(site: Site) -> None:
    content = recipe("auto", steps=12, graphed=True, equivalence={"loss": 0.0, "grad_norm": 0.0}) | {"repeats": "auto"}
    done = site.run("sweep", site.write(content))
    assert done.returncode == ExitCode.FAILED, done.stdout + done.stderr
    assert "Stopped after 2 of up to 6 pairs" in done.stdout
    assert list(site.states("auto").values()) == ["COMPLETED"] * 4 + ["NOT_NEEDED"] * 8
    assert list(site.accounts("State").values()) == ["COMPLETED"], "one job"
    assert "4 on disk; left as they are: 8 NOT_NEEDED" in site.run("resume", "auto").stdout
