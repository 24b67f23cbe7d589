"""Run ranks that hold parts of one model, from the command line. Test that they train the same as one process, and that
a failing rank ends its run."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.contract.outcomes import read_outcome
from launch.contract.plan import read_plan
from launch.contract.records.events import read_events
from tests.integration.host import ROOT, SLOW_RANKS, Host, rank_pid, recipe
from tests.records import read_metrics

WITHOUT_MEMORY = '''
"""Let memory run out in each uncaptured pass of rank 1, and fork from the tests' server."""

import os
import runpy
import sys

runpy.run_path({slow_ranks!r})


def take_memory():
    import torch

    from launch.train.inspection.uncaptured_passes import UncapturedPasses

    computed = UncapturedPasses._computed

    def compute_or_fail(*arguments):
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 1 has 80 GiB")
        return computed(*arguments)

    UncapturedPasses._computed = compute_or_fail


if "launch.train.fork_server" in sys.orig_argv:
    os.register_at_fork(after_in_child=take_memory)
'''


def test_a_check_that_runs_out_of_memory_on_one_rank_costs_only_the_checks(host: Host) -> None:
    """The supervisor begins the run again without checks. Nothing else is repeated, and later repeats have no checks."""
    module = host.folder / "without_memory" / "sitecustomize.py"
    module.parent.mkdir()
    module.write_text(WITHOUT_MEMORY.format(slow_ranks=str(SLOW_RANKS / "sitecustomize.py")))
    host.environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{module.parent}"
    content = recipe("unchecked", steps=12, graphed=True, parallelism={"dp": 2}, step_checks=2, repeats=2)
    done = host.run("sweep", host.write(content))
    sweep = host.sweep("unchecked")
    eager, graphed, again, _ = (sweep.run(run_id) for run_id in host.run_ids("unchecked"))
    assert set(host.states("unchecked").values()) == {"COMPLETED"}, done.stdout
    assert [run.attempt_numbers() for run in (eager, graphed, again)] == [[1], [1, 2], [1]]
    first, second = (read_outcome(attempt) for attempt in graphed.attempts())
    assert first and (first.outcome, first.rank, first.failure_class) == ("CUDA_OOM", 1, "OOM_STEP_CHECK")
    assert second and second.allocation == first.allocation
    for attempt, rank in itertools.product((graphed.attempt(2), again.attempt(1)), range(2)):
        checks = [event["check"] for event in read_events(attempt, rank) if event["kind"] == "step_check"]
        assert [(check["tensors"], check["missing"]) for check in checks] == [(0, 3 * 2**29)] * 2
    assert "not step-checked: the check of step" in (sweep.report / "report.md").read_text()
    assert "CUDA_OOM" not in (sweep.report / "report.md").read_text(), "the run itself has its memory"


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 1},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"dp": 2, "ep": 2},
]


def test_the_shipped_recipe_has_the_same_losses_in_every_layout(host: Host) -> None:
    """This covers its layouts of up to two ranks, over their first steps."""
    content = yaml.safe_load((ROOT / "recipes" / "tiny_parallel.yaml").read_text())
    axes = content["sweep"]["grid"]
    assert all(layout in axes["parallelism"] for layout in LAYOUTS)
    axes["parallelism"] = LAYOUTS
    content["training"]["steps"] = 8
    done = host.run("sweep", host.write(content), seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr

    sweep = host.sweep("tiny_parallel")
    cells = read_plan(sweep).cells
    assert len(cells) == len(LAYOUTS) and len({cell.task_id for cell in cells}) == 1
    alone, *parallel = (list(read_metrics(sweep.run(cell.run_ids[0]).attempt(1))) for cell in cells)
    assert len(alone) == 8 and alone[0].loss - alone[-1].loss > 0.1
    for steps in parallel:
        # float32 resolves 5e-7 of such a loss. Sums in another order differ by a few such units.
        assert [step.loss for step in steps] == pytest.approx([step.loss for step in alone], abs=1e-5)
        assert [step.grad_norm for step in steps] == pytest.approx([step.grad_norm for step in alone], rel=1e-3)
    host.wait_for_nobody()


def environment(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def listeners(port: str) -> list[str]:
    """Return the addresses on which somebody listens at ``port``, as the kernel writes them: 127.0.0.1 is 0100007F."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    sockets = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    places = [place.split(":") for _, place, _, state, *_ in sockets if state == "0A"]
    return [address for address, number in places if int(number, 16) == int(port)]


@pytest.mark.parametrize(
    ("layout", "number", "said"),
    [
        ({"tp": 2}, signal.SIGKILL, "ended by SIGKILL"),
        pytest.param({"pp": 2}, signal.SIGINT, "KeyboardInterrupt", marks=pytest.mark.slow),
    ],
    ids=["tp=2, killed", "pp=2, an exception"],
)
def test_a_rank_that_fails_mid_step_ends_the_run_and_is_named(
    layout: dict[str, int], number: signal.Signals, said: str, host: Host
) -> None:
    host.end_fork_servers()  # The kernel shows the environment with which a fork began.
    model = {**recipe("ranks")["model"], "num_layers": 2}
    (run_id,) = host.begin_unwatched(recipe("ranks", steps=10**6, parallelism=layout) | {"model": model})
    attempt = host.wait_for_step("ranks", run_id)
    assert listeners(environment(rank_pid(attempt))["MASTER_PORT"]) == ["0100007F"]
    os.kill(rank_pid(attempt, 1), number)
    failed = time.time()
    host.wait_for_nobody()
    outcome = host.outcome("ranks", run_id)
    assert outcome.ended - failed < 30
    assert (outcome.outcome, outcome.rank) == ("FAILED", 1), outcome
    assert said in outcome.message and outcome.failure_class in said
