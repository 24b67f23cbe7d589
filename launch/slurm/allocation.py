"""The Slurm allocation of this process: its nodes, its state, a port for its ranks."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.contract.errors import EnvironmentFault
from launch.slurm.command import try_run
from launch.slurm.job_states import stage_of

ANSWER_SECONDS = 2.0
"""How long to ask Slurm for the job's end. A job has only few seconds between SIGTERM and SIGKILL (KillWait)."""
ACCOUNTS_SECONDS = 0.2
"""Seconds between two calls of sacct while it does not know the end yet."""
CONTROLLER_SECONDS = 600.0
RETURN_SECONDS = 10.0
"""How long nodes take to report to a restarted slurmctld. Until then it starts no step, and srun retries only after a
minute."""
LOOPBACK = "127.0.0.1"
PORTS = (10000, 32768)
"""The range of ports for ranks. It is below the ports that the kernel uses for outgoing connections by default."""

_STATE_OF_REASON = {"TimeLimit": "TIMEOUT", "NodeDown": "NODE_FAIL", "NodeFailure": "NODE_FAIL"}
"""squeue shows COMPLETING for a job that is being ended for any cause. The reason may show the cause."""


@dataclass(frozen=True)
class Allocation:
    """The Slurm job of this process."""

    job: str
    """The id as squeue writes it: "123", or "123_4" in an array, where "123" would mean all elements."""
    nodes: tuple[str, ...]
    restarts: int = 0
    """How often Slurm requeued the job after it had started."""

    @staticmethod
    def here(environment: Mapping[str, str] = os.environ) -> Allocation | None:
        """Return the allocation of this process, or None outside a Slurm job.

        Raises:
            EnvironmentFault: scontrol does not list its nodes.
        """
        job, nodes = environment.get("SLURM_JOB_ID"), environment.get("SLURM_JOB_NODELIST")
        if job is None or nodes is None:
            return None
        if "SLURM_ARRAY_TASK_ID" in environment:
            job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
        names = try_run("scontrol", "show", "hostnames", nodes)
        if not names:
            raise EnvironmentFault(f"scontrol show hostnames {nodes}: no answer; is scontrol on PATH in the job?")
        return Allocation(job, tuple(names.split()), int(environment.get("SLURM_RESTART_COUNT", 0)))

    def address(self) -> str:
        """Return the first node's address at which all ranks can reach it.

        On a single node it is the loopback address. Otherwise it is the node's name if that resolves, else Slurm's address.
        """
        first = self.nodes[0]
        if len(self.nodes) == 1:
            return LOOPBACK
        try:
            socket.getaddrinfo(first, None)
            return first
        except OSError:
            described = try_run("scontrol", "--oneliner", "show", "node", first) or ""
            known = re.search(r"\bNodeAddr=(\S+)", described)
            return known[1] if known else first

    def failed_nodes(self) -> tuple[str, ...]:
        """Return the nodes of the job that Slurm reports as down or failing."""
        listed = try_run("sinfo", "--noheader", "--Node", f"--nodes={','.join(self.nodes)}", "--format=%N %T") or ""
        rows = [line.split() for line in listed.splitlines()]
        return tuple(dict.fromkeys(name for name, state in rows if state.startswith(("down", "fail"))))

    def wait_for_controller(self, give_up: Callable[[], bool]) -> None:
        """Wait until slurmctld answers, because srun cannot start a step without it.

        Stop waiting after ten minutes; srun then reports the failure.
        """
        asked = begun = time.monotonic()
        while try_run("squeue", "--noheader", f"--jobs={self.job}") is None:
            if give_up() or time.monotonic() - begun > CONTROLLER_SECONDS:
                return
            time.sleep(1.0)
            asked = time.monotonic()
        # A slow answer means the controller was away, too, because squeue itself retries for some seconds.
        if asked > begun or time.monotonic() - asked > ANSWER_SECONDS:
            time.sleep(RETURN_SECONDS)


def job_state(job: str) -> str | None:
    """Return the state of ``job`` ("123" or "123_4"), or None if Slurm does not answer within two seconds.

    The state is never COMPLETING, which may be any end: sacct knows the cause a moment later. A job that Slurm has put back into
    the queue waits. A job in its grace time before a preemption already counts as PREEMPTED, because an end within that time is
    caused by the preemption.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    fields = "State:30,Reason:60,PreemptTime:30"
    listed = try_run(
        "squeue", "--noheader", f"--jobs={job}", "--states=all", f"--Format={fields}", seconds=ANSWER_SECONDS
    )
    state = queue_state(listed or "")
    if state is not None and state != "COMPLETING":
        return state
    options = ("--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State")
    while True:
        left = max(0.1, deadline - time.monotonic())
        accounted = (try_run("sacct", *options, seconds=left) or "").split()
        # PENDING may be old, but a job that accounting calls REQUEUED has been put back into the queue.
        if accounted and (stage_of(accounted[0]) == "ended" or accounted[0] == "REQUEUED"):
            return accounted[0]
        if time.monotonic() + ACCOUNTS_SECONDS > deadline:
            return None
        time.sleep(ACCOUNTS_SECONDS)


def queue_state(line: str) -> str | None:
    """Return the job's state from a line of squeue. The line has the state, the reason and the time of preemption."""
    words = line.split()
    if len(words) < 3:
        return None
    state, reason, preempted = words[0], words[1], words[-1]
    if state == "COMPLETING":
        return _STATE_OF_REASON.get(reason, state)
    return "PREEMPTED" if preempted != "N/A" and stage_of(state) == "runs" else state


def free_port() -> int:
    """Return a port of this host on which no process listens. It is not reserved until rank 0 takes it."""
    low, high = PORTS
    outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if low < outgoing:
        high = min(high, outgoing)
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", random.SystemRandom().randrange(low, high)))
            return int(probe.getsockname()[1])
