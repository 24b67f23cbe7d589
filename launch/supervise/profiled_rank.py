"""Become a rank under Nsight Systems: ``python -m launch.supervise.profiled_rank ATTEMPT_FOLDER``.

A run with ``profile: nsys`` starts this instead of launch.train.worker. Without nsys it starts only the worker, which reports
this.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from launch.common.parent_death import PARENT, die_with_parent
from launch.contract.paths import OBSERVED, AttemptPaths

NSYS = "nsys"


def main(arguments: list[str]) -> None:
    attempt = AttemptPaths(Path(arguments[0]).absolute())
    worker = [sys.executable, "-u", "-m", "launch.train.worker", str(attempt.root)]
    if shutil.which(NSYS) is None:
        os.execv(worker[0], worker)
    profile = attempt.profile(os.environ["RANK"])
    profile.parent.mkdir(exist_ok=True)
    # SIGUSR1 requests stacks from the worker. It would end nsys. nsys is not the worker's parent either, so drop PARENT.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    variables = {name: value for name, value in os.environ.items() if name != PARENT}
    os.execvpe(NSYS, profiled(worker, profile), {**variables, OBSERVED: str(attempt.root)})


def profiled(worker: list[str], profile: Path) -> list[str]:
    """Return the command that runs ``worker`` and writes its GPU activity and its named ranges to ``profile``."""
    return [
        NSYS, "profile",
        "--trace=cuda,nvtx",
        # Trace a graph as one event. Tracing its nodes would launch its kernels one after the other.
        "--cuda-graph-trace=graph",
        # To sample the host requires privileges that few jobs have.
        "--sample=none", "--cpuctxsw=none",
        "--force-overwrite=true",
        f"--output={profile}",
        *worker,
    ]  # fmt: skip


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1:])
