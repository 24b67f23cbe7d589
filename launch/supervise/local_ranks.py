"""The ranks of one attempt on this host, each a process of launch.train.worker or of the user's program.

torchrun's elastic agent could start them too, but it first imports torch, which takes seconds. Ranks of launch.train.worker
are forks of a server that has imported torch (launch/supervise/forked_ranks.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from launch.contract.paths import AttemptPaths
from launch.contract.spec import RunSpec
from launch.failures.diagnose import Diagnosis, Evidence, RankExit
from launch.slurm.allocation import LOOPBACK, free_port
from launch.supervise.attempt import STACKS_SECONDS
from launch.supervise.child_process import start
from launch.supervise.forked_ranks import ForkedRank, ForkServers
from launch.supervise.oom_kills import oom_kills
from launch.supervise.rank_environment import rank_variables
from launch.supervise.user_command import observed_processes

GRACE_SECONDS = 5.0
"""The time between SIGTERM and SIGKILL."""
WORKER = "launch.train.worker"


class Process(Protocol):
    """The process of a rank: one that this process started (subprocess.Popen), or a fork of a server."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None, /) -> int: ...


class LocalRanks:
    """Ranks on the host of this process. Each leads a process group.

    Args:
        variables: what the ranks of all runs with these settings share, so that they can be forks of one server.
        added: the variables of this attempt alone.
    """

    def __init__(
        self, attempt: AttemptPaths, spec: RunSpec, variables: Mapping[str, str], servers: ForkServers,
        added: Mapping[str, str] = {},
    ) -> None:  # fmt: skip
        count = str(spec.placement.ranks_per_node)
        self._module, processes = rank_program(spec)
        self._shared = {**variables, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": LOOPBACK}
        port = str(free_port())
        own = {"MASTER_PORT": port, **added}
        self._places = [{"RANK": rank, "LOCAL_RANK": rank, **own} for rank in map(str, range(processes))]
        self._killed_before = oom_kills()
        self._failures: list[RankExit] = []
        self._attempt = attempt
        self._arguments = (str(attempt.root),)
        self._is_ending = False
        server = servers.serve(spec, self._shared) if self._module == WORKER else None
        self._ranks: Sequence[Process] = (
            self._start() if server is None else server.fork(self._arguments, self._places, attempt.launcher_log)
        )

    def _start(self) -> list[subprocess.Popen[bytes]]:
        """Start each rank as a new interpreter."""
        log = self._attempt.launcher_log
        return [start(self._module, self._arguments, {**self._shared, **place}, log) for place in self._places]

    def poll(self) -> int | None:
        # Ask first: the server may end in between, and a rank that never began has not failed.
        codes = [rank.poll() for rank in self._ranks]
        if not self._is_ending and all(isinstance(rank, ForkedRank) and rank.is_lost() for rank in self._ranks):
            sys.stderr.write(
                f"{self._attempt.root}: the fork server ended, so each rank is started as a new interpreter\n"
            )
            self._ranks = self._start()
            codes = [rank.poll() for rank in self._ranks]
        known = {failure.rank for failure in self._failures}
        self._failures += [RankExit(rank, code) for rank, code in enumerate(codes) if code and rank not in known]
        if self._failures:
            return self._failures[0].code
        return None if None in codes else 0

    def exits(self) -> tuple[RankExit, ...]:
        oom_killed = oom_kills() > self._killed_before
        return tuple(replace(failure, oom_killed=oom_killed) for failure in self._failures)

    def print_stacks(self) -> None:
        """Send SIGUSR1, which makes each rank's faulthandler write all stacks to the rank's log."""
        for pid in {rank.pid for rank in self._ranks} | observed_processes(self._attempt):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                # A stopped process cannot print.
                os.kill(pid, signal.SIGCONT)
        time.sleep(STACKS_SECONDS)

    def end(self) -> None:
        """End the ranks and the processes that they started, such as compilers."""
        self._is_ending = True
        deadline = time.monotonic() + GRACE_SECONDS
        self._send(signal.SIGTERM)
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, deadline - time.monotonic()))
        self._send(signal.SIGKILL)
        for rank in self._ranks:
            rank.wait()
        for pid in observed_processes(self._attempt):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to the process groups of all running ranks."""
        for rank in self._ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, number)

    def ask_scheduler(self, evidence: Evidence) -> Evidence:
        """Return ``evidence`` unchanged, because there is no scheduler."""
        return evidence

    def where(self, diagnosis: Diagnosis) -> str:
        """Return "", because the only node is this host."""
        return ""


def rank_program(spec: RunSpec) -> tuple[str, int]:
    """Return the module that starts ranks on a node, and the number of its processes there."""
    worker = "launch.supervise.profiled_rank" if spec.profile == "nsys" else WORKER
    module = "launch.supervise.user_command" if spec.engine == "command" else worker
    return module, spec.placement.ranks_per_node // spec.ranks_per_task


def local_variables(spec: RunSpec, cluster: Mapping[str, str], slot_names: tuple[str, ...]) -> dict[str, str]:
    """Return the ranks' environment. Ranks see only the GPUs of the bundle's slots."""
    devices = ",".join(slot_names) if spec.placement.device == "cuda" else ""
    return rank_variables(spec, cluster, {"CUDA_VISIBLE_DEVICES": devices})
