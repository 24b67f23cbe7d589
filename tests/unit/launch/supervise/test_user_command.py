"""Test the environment of a user's program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launch.common.atomic_files import write_json
from launch.common.parent_death import PARENT
from launch.contract.paths import OBSERVED, AttemptPaths
from launch.contract.spec import Command, RunSpec, Training, spec_to_json
from launch.supervise.user_command import observed_processes, program_variables


@pytest.mark.parametrize("framework", ["megatron_lm", "megatron_bridge"])
def test_deterministic_megatron_gets_its_variables_unless_the_user_sets_them(framework: str) -> None:
    """Without NCCL_ALGO, Megatron Bridge 0.6.2 ends at once."""
    command = Command(framework=framework, run="torchrun train.py")  # type: ignore[arg-type]
    spec = RunSpec(engine="command", command=command, training=Training(deterministic=True))
    attempt = AttemptPaths(Path("attempt"))
    variables = program_variables(spec, attempt, {"NCCL_ALGO": "CollnetChain"})
    assert variables["NCCL_ALGO"] == "CollnetChain" and variables["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert "NCCL_ALGO" not in program_variables(replace(spec, training=Training()), attempt, {})


SUPERVISOR = """
import os, sys, time
from pathlib import Path
from launch.supervise.child_process import start
child = start("launch.supervise.user_command", (sys.argv[1],), {**os.environ, "RANK": "0"}, Path(sys.argv[1], "log"))
time.sleep(60)
"""


def test_ranks_that_a_launcher_put_into_their_own_sessions_end_with_the_supervisor(tmp_path: Path) -> None:
    """As torchrun does. The kernel ends only the launcher."""
    spec = RunSpec(
        "command", command=Command(run="bash -c 'setsid sleep 60 & echo $! >rank; wait'", workdir=str(tmp_path))
    )
    attempt = AttemptPaths(tmp_path / "runs" / spec.run_id / "attempts" / "1")
    attempt.logs.mkdir(parents=True)
    write_json(attempt.spec, spec_to_json(spec))
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(attempt.root)])
    try:
        wait_until(lambda: (tmp_path / "rank").exists() and len(observed_processes(attempt)) == 2)
    finally:
        supervisor.kill()
        supervisor.wait()
    rank = int((tmp_path / "rank").read_text())
    try:
        wait_until(lambda: not observed_processes(attempt))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)


def test_a_rank_of_a_slurm_step_ends_no_other_rank_though_it_has_no_input(tmp_path: Path) -> None:
    spec = RunSpec("command", command=Command(run="bash -c 'sleep 1; echo trained'", workdir=str(tmp_path)))
    attempt = AttemptPaths(tmp_path / "runs" / spec.run_id / "attempts" / "1")
    attempt.logs.mkdir(parents=True)
    write_json(attempt.spec, spec_to_json(spec))
    step = {**os.environ, "RANK": "0", "SLURM_STEP_ID": "1", PARENT: str(os.getpid())}
    command = [sys.executable, "-m", "launch.supervise.user_command", str(attempt.root)]
    with subprocess.Popen(["sleep", "60"], env={OBSERVED: str(attempt.root), "PATH": os.environ["PATH"]}) as other:
        subprocess.run(command, stdin=subprocess.DEVNULL, env=step, check=True)
        assert other.poll() is None and attempt.log(0).read_text() == "trained\n"
        other.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
