"""Test what becomes of runs that were skipped and of their jobs, and of a failed run that is tried again."""

from __future__ import annotations

import signal

import pytest

from launch.contract.exit_codes import ExitCode
from tests.integration.host import program_recipe, wait_until
from tests.slurm.site import Site
from tests.slurm.test_submission import KILL

pytestmark = pytest.mark.slurm

PROGRAM = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--batch", type=int)
if pathlib.Path("mended").exists():
    parser.add_argument("--new", action="store_true")
options = parser.parse_args()
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = torch.randn(16, 8)
for step in range(options.steps):
    loss = (model(data) - data[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print({"step": step + 1, "loss": loss.item()}, flush=True)
"""


@pytest.mark.parametrize("watched", [True, False])
def test_a_job_whose_runs_are_all_skipped_leaves_the_queue_and_is_submitted_again_once(
    site: Site, watched: bool
) -> None:
    """The command that watches the sweep takes it out of the queue, or else the next command does."""
    (site.folder / "train.py").write_text(PROGRAM)
    run = "{python} train.py --steps {steps} --batch {micro_batch_size} --new"
    grid = {"training.micro_batch_size": [1, 2]}
    path = site.write(program_recipe("mine", run, {}) | {"sweep": {"grid": grid}})
    with site.full():
        first = site.start("sweep", path, *([] if watched else ["--no-wait"]))
        wait_until(lambda: bool(site.job_ids("mine")), 120, "a job")
        (array,) = site.job_ids("mine")
        site.cluster.run("scontrol", "uhold", f"{array}_1")
    wait_until(lambda: site.has_ended("mine"), 120, "the first run", site.queue)
    out, err = first.communicate(timeout=120)
    assert list(site.states("mine").values()) == ["CONFIG", "SKIPPED"], out + err
    # The job of the first run ends some time after its outcome.
    left = {} if watched else {f"{array}_1": "PENDING"}
    wait_until(lambda: site.queue() == left, 60, "the queue without runs that have ended", site.queue)

    (site.folder / "mended").touch()
    done = site.run("resume", "mine", "--failed")
    assert f"job {array}_1 is cancelled: each of its runs is skipped" in (out if watched else done.stdout)
    assert list(site.states("mine").values()) == ["COMPLETED", "COMPLETED"], done.stdout + done.stderr
    assert sorted(site.attempts("mine").values()) == [[1], [1, 2]]
    assert sorted(site.accounts("State").values()) == ["COMPLETED"] * 3, "each run that began had a job"


def test_a_failed_run_that_a_killed_command_ordered_again_begins_with_the_next_command(site: Site) -> None:
    """Nothing was submitted, so only the order on disk says that somebody has asked for another attempt."""
    (site.folder / "train.py").write_text(PROGRAM)
    path = site.write(program_recipe("mine", "{python} train.py --steps {steps} --new", {}) | {"repeats": 2})
    site.run("sweep", path)
    assert list(site.states("mine").values()) == ["CONFIG", "SKIPPED"]
    (site.folder / "mended").touch()
    site.program("sbatch", f"{KILL}; exit 1")
    killed = site.start("resume", "mine", "--failed")
    killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL
    site.without_program("sbatch")
    done = site.run("sweep", path)
    assert list(site.states("mine").values()) == ["COMPLETED", "COMPLETED"], done.stdout + done.stderr
    assert list(site.attempts("mine").values()) == [[1, 2], [1]]


FAILS_ONCE = PROGRAM.replace(
    "options =",
    """
failed = pathlib.Path("failed")
if not failed.exists():
    failed.touch()
    sys.exit("no license left")
while pathlib.Path("held").exists():
    time.sleep(0.1)
options =""",
).replace("import ", "import sys, time, ", 1)


@pytest.mark.parametrize("cancelled", ["", "all", "the failed run"])
def test_a_failed_run_of_a_job_that_goes_on_begins_once_after_it(site: Site, cancelled: str) -> None:
    """Two commands wait for the end of the job. One that does not wait says what to do, and `cancel` ends the wait."""
    (site.folder / "train.py").write_text(FAILS_ONCE)
    (held := site.folder / "held").touch()
    path = site.write(program_recipe("mine", "{python} train.py --steps {steps}", {}) | {"repeats": 2})
    assert site.run("sweep", path, "--no-wait").returncode == 0
    wait_until(lambda: [*site.states("mine").values()] == ["FAILED", "RUNNING"], 120, "a failure", site.queue)

    short = site.run("resume", "mine", "--failed", "--no-wait")
    assert short.returncode == ExitCode.UNFINISHED, short.stdout + short.stderr
    assert "1 run left out, since a job of the same bundle still runs or waits" in short.stdout
    assert "this submits the rest:\n" in short.stderr and "resume mine --failed" in short.stderr
    waiting = [site.start("resume", "mine", "--failed") for _ in "ab"]
    for command in waiting:
        assert command.stdout is not None
        assert any("1 more run to start once the job of the same bundle has ended" in line for line in command.stdout)
    failed, _ = site.states("mine")
    if cancelled:
        assert site.run("cancel", "mine", *[failed] * (cancelled != "all")).returncode == 0
    if cancelled != "all":
        held.unlink()
    ends = [command.communicate(timeout=240) for command in waiting]
    ended = ["FAILED" if cancelled else "COMPLETED", "CANCELLED" if cancelled == "all" else "COMPLETED"]
    assert [*site.states("mine").values()] == ended, ends
    assert [*site.attempts("mine").values()] == ([[1], [1]] if cancelled else [[1, 2], [1]])
    assert len(site.job_ids("mine")) == (1 if cancelled else 2)
