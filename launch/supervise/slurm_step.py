"""The ranks of one attempt as a step of a Slurm job: one srun, which starts launch.supervise.slurm_rank for each task."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping

from launch.common.atomic_files import RecordError, read_json
from launch.contract.bundle import Step
from launch.contract.paths import AttemptPaths
from launch.contract.spec import RunSpec, first_of_task
from launch.failures.diagnose import Diagnosis, EndedBy, Evidence, RankExit, diagnose, is_explained
from launch.slurm.allocation import Allocation, free_port, job_state
from launch.slurm.command import try_run
from launch.slurm.job_states import stage_of
from launch.slurm.step_end import cancelled_first, step_end
from launch.supervise.attempt import STACKS_SECONDS
from launch.supervise.rank_environment import rank_variables

LEAVE_SECONDS = 30.0
"""How long a step may take to end after a rank has failed or all ranks have ended.

Slurm sends SIGTERM to the other ranks of a failed one, but no SIGKILL. srun never ends if slurmstepd is gone.
"""
END_SECONDS = 60.0
"""How long a step's processes may take to end after SIGKILL. Slurm gives up after the same time (UnkillableStepTimeout)."""
FOR_SRUN = ("SLURM_CONF", "SLURM_JOB_ID")
"""The variables that srun needs: Slurm's configuration, and the job that gets the step."""
OF_DEVICES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables with the supervisor's GPUs. A step may have other GPUs on another node, and Slurm sets these variables per rank."""


class StepRanks:
    """Ranks in one step of ``allocation``. Each task of the step starts ``ranks_per_task`` ranks."""

    def __init__(
        self,
        attempt: AttemptPaths,
        step: Step,
        allocation: Allocation,
        variables: Mapping[str, str],
        ranks_per_task: int,
    ) -> None:
        self._attempt = attempt
        self._step = step
        self._allocation = allocation
        self._ranks_per_task = ranks_per_task
        self._name = step_name(attempt)
        self._codes: dict[int, int] = {}
        self._over_at: float | None = None
        self._was_ended = False
        with open(attempt.launcher_log, "ab") as log:
            self._srun = subprocess.Popen(
                srun_command(step, attempt),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(variables),
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return srun's exit code, or minus the signal that ended a rank; None while it runs.

        Return 0 if each rank has recorded that it ended with 0. srun's own code then says nothing about them.
        """
        code = self._srun.poll()
        if code is None and self._should_have_ended():
            self.end()
            code = self._srun.wait()
        if code is not None and self._have_all_succeeded():
            return 0
        return code if code is None or not 128 < code <= 128 + signal.SIGRTMAX else 128 - code

    def exits(self) -> tuple[RankExit, ...]:
        """Return the failed ranks, the first failure first. For a task with several ranks, return its first rank."""
        # Find files by name. On a shared file system, a listing may be older than the files of other nodes.
        found = {rank: self._exit_of(rank) for rank in self._first_ranks}
        failed = [rank_exit for rank_exit in found.values() if rank_exit is not None and rank_exit.code != 0]
        if failed and self._srun.poll() is not None:
            # A rank without a record counts as killed. It may have been killed together with the process that records its end,
            # or while that process waits for a disk.
            gone = [rank for rank, rank_exit in found.items() if rank_exit is None]
            failed += [RankExit(rank, -signal.SIGKILL, math.inf, is_recorded=False) for rank in gone]
        return tuple(sorted(failed, key=lambda rank_exit: (rank_exit.time or 0.0, rank_exit.rank)))

    def print_stacks(self) -> None:
        """Send SIGUSR1, which makes each rank's faulthandler write all stacks to the rank's log."""
        step = self._find()
        if step is not None:
            try_run("scancel", "--signal=USR1", step)
            # A stopped process cannot print.
            try_run("scancel", "--signal=CONT", step)
            time.sleep(STACKS_SECONDS)

    def end(self) -> None:
        """End the step on all nodes. Return when it has ended, or when Slurm cannot end it in time.

        srun may end before its step, so only the queue shows that the nodes are free.
        """
        self._was_ended = True
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            step = self._find()
            if step is not None:
                try_run("scancel", step)
            elif self._srun.poll() is not None:
                return
            else:
                self._srun.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._srun.wait(1.0)
        self._srun.kill()
        self._srun.wait()

    def ask_scheduler(self, evidence: Evidence) -> Evidence:
        """Add Slurm's answer to ``evidence`` if the ranks' records do not explain their end."""
        if is_explained(evidence):
            return evidence
        state = job_state(self._allocation.job)
        if state is not None and stage_of(state) == "ended":
            return dataclasses.replace(evidence, ended_by="job", job_state=state)
        if state is not None and stage_of(state) == "waits":
            # Slurm has put this job back into the queue. The supervisor that it starts next writes the outcome.
            return dataclasses.replace(evidence, ended_by="job")
        if evidence.ended_by == "job":
            # The supervisor got SIGTERM, but the job goes on. So somebody asked only this supervisor to end, as on a host.
            asked: EndedBy = "cancel" if state is not None and stage_of(state) == "runs" else "job"
            return dataclasses.replace(evidence, ended_by=asked)
        if diagnose(evidence).failure_class in ("SIGKILL", "COMMUNICATION"):
            end = step_end(self._allocation.job, self._name)
            # srun and this process also cancel the step if a rank fails, and srun if it is killed itself. Then a rank has recorded
            # an end of its own, or srun's own code is a signal. Ranks of a cancelled step may see first that others are gone.
            caused = all(not e.is_recorded or e.rank in evidence.ranks_of_consequences for e in evidence.exits)
            printed = not end.over_memory and cancelled_first(self._attempt.launcher_log.read_text(errors="replace"))
            by_somebody = (end.cancelled or printed) and caused and not self._was_ended and self._srun.wait() > 0
            ended_by: EndedBy = "cancel" if by_somebody else evidence.ended_by
            return dataclasses.replace(evidence, ended_by=ended_by, over_memory=end.over_memory)
        return evidence

    def where(self, diagnosis: Diagnosis) -> str:
        """Return the node of the failed rank, or the failed nodes."""
        if diagnosis.outcome == "NODE_FAIL":
            # A single node is certain without asking Slurm, and the signal that ends the job may end the command that asks.
            nodes = self._allocation.nodes
            return ",".join(nodes if len(nodes) == 1 else self._allocation.failed_nodes())
        if diagnosis.rank is None:
            return ""
        rank_exit = self._exit_of(first_of_task(diagnosis.rank, self._ranks_per_task))
        # A user's program may start more ranks than the spec says.
        there = dict(enumerate(self._allocation.nodes))
        return rank_exit.node if rank_exit else there.get(diagnosis.rank // self._ranks_per_node, "")

    @property
    def _ranks_per_node(self) -> int:
        return self._step.ranks_per_node * self._ranks_per_task

    @property
    def _first_ranks(self) -> range:
        """The first rank of each task."""
        return range(0, self._step.nodes * self._ranks_per_node, self._ranks_per_task)

    def _exit_of(self, rank: int) -> RankExit | None:
        try:
            return RankExit(**read_json(self._attempt.rank_exit(rank)))
        except (FileNotFoundError, RecordError):
            return None

    def _find(self) -> str | None:
        """Return the step's id for scancel ("123_4.0"), or None if Slurm does not list it."""
        listed = try_run("squeue", "--noheader", "--steps", f"--jobs={self._allocation.job}", "--format=%i %j") or ""
        rows = (line.split(maxsplit=1) for line in listed.splitlines())
        return next((step for step, *name in rows if name == [self._name]), None)

    def _should_have_ended(self) -> bool:
        """Return whether a rank failed, or the last one ended, more than LEAVE_SECONDS ago.

        Each exit is read only once, since there may be many.
        """
        for path in self._attempt.rank_exits.glob("rank*.json"):
            rank = int(path.stem.removeprefix("rank"))
            if rank not in self._codes and (rank_exit := self._exit_of(rank)) is not None:
                self._codes[rank] = rank_exit.code
        if self._over_at is None and (any(self._codes.values()) or self._have_all_succeeded()):
            self._over_at = time.monotonic()
        return self._over_at is not None and time.monotonic() - self._over_at > LEAVE_SECONDS

    def _have_all_succeeded(self) -> bool:
        return self._codes.keys() == set(self._first_ranks) and not any(self._codes.values())


def step_name(attempt: AttemptPaths) -> str:
    """Return the step's name, unique within its job."""
    return f"{attempt.root.parent.parent.name}.{attempt.number}"


def srun_command(step: Step, attempt: AttemptPaths) -> list[str]:
    """Return the command that starts the ranks. The profile's arguments come last and override ours."""
    return [
        "srun",
        # The supervisor's own step already has a part of the first node.
        "--overlap",
        "--kill-on-bad-exit=1",
        f"--nodes={step.nodes}",
        f"--ntasks={step.nodes * step.ranks_per_node}",
        f"--ntasks-per-node={step.ranks_per_node}",
        # Since 22.05 srun does not inherit this from the job.
        f"--cpus-per-task={step.cpus_per_rank}",
        "--distribution=block",
        "--unbuffered",
        "--input=none",
        "--export=ALL",
        f"--job-name={step_name(attempt)}",
        *step.arguments,
        step.python, "-u", "-m", "launch.supervise.slurm_rank", str(attempt.root),
    ]  # fmt: skip


def step_variables(
    spec: RunSpec, cluster: Mapping[str, str], allocation: Allocation, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return srun's environment, which ranks inherit. Their rendezvous is on the first node, where this process runs."""
    placing = {name: inherited[name] for name in FOR_SRUN if name in inherited}
    placing |= {"MASTER_ADDR": allocation.address(), "MASTER_PORT": str(free_port())}
    kept = {name: value for name, value in inherited.items() if name not in OF_DEVICES}
    return rank_variables(spec, cluster, placing, kept)
