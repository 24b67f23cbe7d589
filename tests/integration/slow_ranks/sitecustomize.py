"""Slow a rank down during its first steps, so that a test can act on it there, and hold it while a test requests that.
Slow a run that only a test ends down in all its steps. A rank sleeps, which costs other processes no time.

Python imports a module of this name at its start (docs.python.org/3/library/site.html).
"""

import atexit
import json
import os
import signal
import sys
import time
from functools import cache
from pathlib import Path

PAUSES = iter(range(50))
COMPUTE_SECONDS, PAUSE_SECONDS = 0.005, 0.04


HOLD = Path(os.environ.get("HOME", "/"), "hold")
"""While this file exists, a rank that has trained some steps does not continue."""
STEPS_BEFORE_HOLD = 6
ENDLESS = 10**6
"""The steps of a run that a test ends."""


def pause(*_: object) -> None:
    """Sleep if a step is on disk, and call this again soon. During a compilation there are no pauses."""
    if steps_on_disk():
        if next(PAUSES, None) is None and not HOLD.exists() and not endless():
            return
        time.sleep(PAUSE_SECONDS)
        while HOLD.exists() and steps_on_disk() >= STEPS_BEFORE_HOLD:
            time.sleep(PAUSE_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, COMPUTE_SECONDS)


def steps_on_disk() -> int:
    metrics = Path(sys.orig_argv[-1], "metrics.jsonl")
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@cache
def endless() -> bool:
    spec = json.loads(Path(sys.orig_argv[-1]).parents[1].joinpath("spec.json").read_text())
    return bool(spec["training"]["steps"] >= ENDLESS)


def slow_down() -> None:
    signal.signal(signal.SIGALRM, pause)
    signal.setitimer(signal.ITIMER_REAL, COMPUTE_SECONDS)
    # The interpreter removes signal handlers when it ends, and the alarm would then kill the process.
    atexit.register(signal.signal, signal.SIGALRM, signal.SIG_IGN)


# Under Slurm the first rank is slow, and the others wait for it.
if os.environ.get("WORLD_SIZE") == "1" or ("SLURM_JOB_ID" in os.environ and os.environ.get("RANK") == "0"):
    if "launch.train.worker" in sys.orig_argv:
        slow_down()
    elif "launch.train.fork_server" in sys.orig_argv:
        os.register_at_fork(after_in_child=slow_down)

STARTERS = {"launch.supervise.supervisor", "launch.supervise.slurm_rank", "orchestrator"}
if "FORK_SERVER" in os.environ and not STARTERS.isdisjoint(sys.orig_argv):
    from tests.integration.fork_server import fork_children

    fork_children()
