"""One task of a step: ``python -m launch.supervise.slurm_rank ATTEMPT_FOLDER``, started by srun.

There is one task for each rank, or for each torchrun. The task passes the rank's place to the program (``rank_program``) and
records how the program ended. It outlives the program: Slurm signals all processes of a step, but the signals do not end this
one.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from launch.common.atomic_files import write_json
from launch.common.parent_death import PARENT
from launch.contract.paths import AttemptPaths
from launch.contract.spec import read_spec
from launch.supervise.compilers import LOOK_SECONDS, CompilerWatch
from launch.supervise.local_ranks import rank_program
from launch.supervise.oom_kills import oom_kills


def main(arguments: list[str]) -> int:
    """Run the rank. Return its exit code, or 128 + n if signal n ended it."""
    # Ignore Slurm's notice before the job's end. The rank inherits this.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    # Ignore the request for stacks, which is for the rank.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    attempt = AttemptPaths(Path(arguments[0]))
    spec = read_spec(attempt.spec)
    place = rank_place(os.environ, spec.ranks_per_task)
    killed_before = oom_kills()
    module, _ = rank_program(spec)
    worker = subprocess.Popen(
        [sys.executable, "-u", "-m", module, str(attempt.root)], env={**os.environ, **place, PARENT: str(os.getpid())}
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.terminate())
    code = _wait(worker, attempt)
    rank = int(place["RANK"])
    end = {"rank": rank, "code": code, "time": time.time(), "node": os.environ.get("SLURMD_NODENAME", "")}
    write_json(attempt.rank_exit(rank), end | {"oom_killed": oom_kills() > killed_before})
    return code if code >= 0 else 128 - code


def _wait(worker: subprocess.Popen[bytes], attempt: AttemptPaths) -> int:
    """Wait for the rank, and return its exit code. Until the first step, print while compilers work.

    The line goes to the attempt's launcher.log, where it counts as a sign of life: the supervisor may be on another node.
    """
    compilers = CompilerWatch(os.getpid(), time.monotonic())
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return worker.wait(LOOK_SECONDS)
        if not attempt.metrics.exists() and compilers.are_busy(time.monotonic()):
            sys.stderr.write(f"{os.environ.get('SLURMD_NODENAME', '')}: compilers work\n")


def rank_place(environment: Mapping[str, str], ranks_per_task: int) -> dict[str, str]:
    """Return torch.distributed's variables from those of an srun task (srun(1), OUTPUT ENVIRONMENT VARIABLES).

    If a task starts several ranks, ``RANK`` is the first of them. The other variables count tasks.
    """
    here = environment.get("SLURM_NTASKS_PER_NODE") or _tasks_on(
        int(environment["SLURM_NODEID"]), environment["SLURM_STEP_TASKS_PER_NODE"]
    )
    return {
        "RANK": str(int(environment["SLURM_PROCID"]) * ranks_per_task),
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(here),
    }


def _tasks_on(node: int, counts: str) -> int:
    """Return the number of tasks on node number ``node`` of the step. ``counts`` has Slurm's notation, such as "2(x3),1"."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={counts} has no count for node {node}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
