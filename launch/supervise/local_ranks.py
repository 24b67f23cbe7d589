"""The ranks of one attempt on this host, under torchrun's agent (launch.train.torchrun_agent)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from launch.common.atomic_files import read_json
from launch.contract.paths import AttemptPaths
from launch.contract.spec import RunSpec
from launch.failures.diagnose import Diagnosis, Evidence, RankExit
from launch.failures.evidence import read_all_events
from launch.supervise.child_process import start
from launch.supervise.oom_kills import oom_kills
from launch.supervise.rank_environment import rank_variables

GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL."""
STACKS_SECONDS = 1.0
"""How long ranks may take to print their stacks."""


class LocalRanks:
    """Ranks on the host of this process."""

    def __init__(self, attempt: AttemptPaths, variables: Mapping[str, str]) -> None:
        self._attempt = attempt
        self._killed_before = oom_kills()
        self._ranks = start(
            "launch.train.torchrun_agent", (str(attempt.root),), variables, attempt.logs / "launcher.log"
        )

    def poll(self) -> int | None:
        return self._ranks.poll()

    def exits(self) -> tuple[RankExit, ...]:
        oom_killed = oom_kills() > self._killed_before
        try:
            rows = read_json(self._attempt.exits)
        except FileNotFoundError:
            return ()
        return tuple(RankExit(row["rank"], row["code"], oom_killed=oom_killed) for row in rows)

    def print_stacks(self) -> None:
        """Send SIGUSR1: each rank's faulthandler writes all stacks to the rank's log."""
        for lines in read_all_events(self._attempt).values():
            pid = lines[0].get("pid") if lines else None
            if pid is not None and _parent(pid) == self._ranks.pid:
                os.kill(pid, signal.SIGUSR1)
                # A stopped process cannot print.
                os.kill(pid, signal.SIGCONT)
        time.sleep(STACKS_SECONDS)

    def end(self) -> None:
        self._ranks.terminate()
        try:
            self._ranks.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            # Its ranks end with it (launch.common.parent_death).
            self._ranks.kill()
            self._ranks.wait()

    def ask_scheduler(self, evidence: Evidence) -> Evidence:
        """Return ``evidence`` as it is: there is no scheduler here."""
        return evidence

    def where(self, diagnosis: Diagnosis) -> str:
        """Return "": this host needs no name."""
        return ""


def local_variables(spec: RunSpec, cluster: Mapping[str, str], slot_names: tuple[str, ...]) -> dict[str, str]:
    """Return the ranks' environment. Of the host's GPUs they see those of the bundle's slots."""
    devices = ",".join(slot_names) if spec.placement.device == "cuda" else ""
    return rank_variables(spec, cluster, {"CUDA_VISIBLE_DEVICES": devices})


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
