"""Test what becomes of runs that were skipped and of their jobs, and of a failed run that is tried again."""

from __future__ import annotations

import signal

import pytest

from tests.integration.host import program_recipe, wait_until
from tests.slurm.site import Site
from tests.slurm.test_submission import KILL

pytestmark = pytest.mark.slurm

PROGRAM = """
import argparse, pathlib, torch
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--batch", type=int)
if pathlib.Path("mended").exists():
    parser.add_argument("--new", action="store_true")
options = parser.parse_args()
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
    wait_until(lambda: "CONFIG" in site.states("mine").values(), 120, "the first run", site.queue)
    out, err = first.communicate(timeout=120)
    assert list(site.states("mine").values()) == ["CONFIG", "SKIPPED"], out + err
    assert site.queue() == ({} if watched else {f"{array}_1": "PENDING"})

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
