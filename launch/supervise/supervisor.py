"""A bundle's only supervisor. It runs the attempts one after another, each as a new process group.

It is the same in a Slurm job and on a laptop. While it lives, only it writes outcomes. Two supervisors of a bundle do the work
once, because a supervisor holds a lock and never starts an attempt whose folder exists. If it dies, its ranks die with it
(launch.common.parent_death, or Slurm), and the running attempt has no outcome.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from launch.common.atomic_files import JsonLines, RecordError, write_json
from launch.common.file_lock import Lock, holder, this_process
from launch.common.regular_file import read_regular
from launch.common.typed_json import read_record
from launch.contract.bundle import Beginning, BundleOrder, runs_not_begun
from launch.contract.cancellation import read_cancellation
from launch.contract.outcomes import OUT_OF_MEMORY_IN_CHECK, Outcome, outcome_to_json
from launch.contract.paths import UNCHECKED, AttemptPaths, BundlePaths
from launch.contract.records.memory import requested_bytes
from launch.contract.spec import RunSpec, read_spec
from launch.failures.diagnose import EndedBy, diagnose_job_end, without_spec
from launch.failures.evidence import last_phases, read_all_events
from launch.failures.job_outcome import make_outcome
from launch.slurm.allocation import Allocation
from launch.supervise import host_slots
from launch.supervise.attempt import Ranks, run_attempt
from launch.supervise.child_process import Tracker, judge_verdicts
from launch.supervise.forked_ranks import ForkServers
from launch.supervise.local_ranks import LocalRanks, local_variables
from launch.supervise.pack_attempt import pack_if_completed
from launch.supervise.slurm_step import StepRanks, step_variables

GATHER_SECONDS = 30.0
"""How long trackers may continue to deliver after the bundle's last run has ended."""
ORDER_SECONDS = 60.0
"""How long a file of the login node may take to appear on a compute node. An NFS client may cache its absence that long."""
LOCK_SECONDS = 120.0
"""How long a job waits for the bundle's lock. A file system may keep a dead node's lock for a while."""


class Supervisor:
    """Supervises one bundle in this process. ``job`` is the bundle's Slurm job, or None on a host."""

    def __init__(self, bundle: BundlePaths, order: BundleOrder, job: Allocation | None) -> None:
        self._bundle = bundle
        self._order = order
        self._job = job
        self._asked_to_end = False
        self._trackers: list[Tracker] = []
        self._servers = ForkServers(bundle.log)
        self._missing: dict[str, int] = {}
        """The bytes that step checks of a cell lacked in this allocation. Its other repeats begin without checks."""
        self._judged: set[str] = set()
        """Runs before which verdicts were judged."""

    def run(self) -> None:
        """Run every ordered attempt that has not started, until asked to end."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        held = host_slots.acquire(self._order.slot_names, self._order.slots, self._all_cancelled)
        if held is None:
            return
        number = self._record_allocation()
        if self._job is not None and self._job.restarts > 0:
            self._close_requeued(f"{self._order.bundle_id}.{number - 1}")
        while (following := self._next_attempt()) is not None:
            run_id, attempt = following
            if self._job is not None:
                self._job.wait_for_controller(give_up=lambda: self._asked_to_end)
            if due := self._due_looks(run_id):
                self._judged |= due
                judge_verdicts(self._bundle, give_up=partial(self._end_request, run_id))
            elif self._end_request(run_id) is None and self._claim(run_id, attempt):
                self._run_attempts(run_id, attempt, f"{self._order.bundle_id}.{number}", held.names)
        self._servers.close()
        held.release()
        hurries = self._asked_to_end and self._job is not None
        deadline = time.monotonic() + (0.0 if hurries else GATHER_SECONDS)
        for tracker in self._trackers:
            tracker.finish(deadline - time.monotonic())

    def _due_looks(self, run_id: str) -> Set[str]:
        """Return the runs, up to ``run_id``, before which verdicts are to be judged and were not. Some may be skipped."""
        ordered = [run for run, _ in self._order.schedule]
        return {*ordered[: ordered.index(run_id) + 1]}.intersection(self._order.looks) - self._judged

    def _next_attempt(self) -> tuple[str, AttemptPaths] | None:
        """Return the next ordered attempt that has not started, may begin and is not cancelled.

        Read the order again, because a command may have ordered more.
        """
        with contextlib.suppress(FileNotFoundError, RecordError):
            newest, own = read_record(BundleOrder, self._bundle.order), self._order
            # A job runs only the order for which it was submitted. On a host, an order for other slots is left to the next
            # supervisor.
            like_own = replace(newest, schedule=own.schedule, looks=own.looks, awaited=own.awaited)
            if self._job is None and like_own == own:
                self._order = newest
        not_begun = runs_not_begun(self._bundle, self._order)
        left = ((run_id, attempt) for run_id, attempt in self._attempts() if not attempt.root.exists())
        return next((one for one in left if one[0] not in not_begun and self._end_request(one[0]) is None), None)

    def _claim(self, run_id: str, attempt: AttemptPaths) -> bool:
        """Create the attempt's folder. Return False if another process has created it."""
        # Record the beginning before the folder exists, so that the supervisor of every existing attempt is known.
        with JsonLines(self._bundle.begun) as lines:
            lines.write(Beginning(run_id, attempt.number, time.time(), this_process()))
        attempt.root.parent.mkdir(parents=True, exist_ok=True)
        try:
            attempt.root.mkdir()
        except FileExistsError:
            return False
        return True

    def _attempts(self) -> Iterator[tuple[str, AttemptPaths]]:
        return ((run_id, self._bundle.sweep.run(run_id).attempt(k)) for run_id, k in self._order.schedule)

    def _run_attempts(self, run_id: str, attempt: AttemptPaths, allocation: str, slot_names: tuple[str, ...]) -> None:
        """Run ``attempt``. If memory runs out in one of its step checks, run another attempt without checks."""
        following = self._bundle.sweep.run(run_id).attempt(attempt.number + 1)
        cell, _, _ = run_id.rpartition("-r")
        known, begins_again = cell in self._missing, False

        def claim_following(outcome: Outcome) -> None:
            """Claim it before the outcome is there, so that nobody takes the run for finished."""
            nonlocal begins_again
            if outcome.failure_class == OUT_OF_MEMORY_IN_CHECK and not known:
                self._missing[cell] = requested_bytes(outcome.message)
                begins_again = self._end_request(run_id) is None and self._claim(run_id, following)

        self._run_attempt(attempt, allocation, slot_names, self._unchecked(cell), claim_following)
        if begins_again:
            self._run_attempt(following, allocation, slot_names, self._unchecked(cell), lambda _: None)

    def _unchecked(self, cell: str) -> Mapping[str, str]:
        """Return the variable that turns step checks off if an earlier attempt of ``cell`` lacked memory for them."""
        return {UNCHECKED: str(self._missing[cell])} if cell in self._missing else {}

    def _run_attempt(
        self, attempt: AttemptPaths, allocation: str, slot_names: tuple[str, ...], added: Mapping[str, str],
        before_outcome: Callable[[Outcome], None]
    ) -> None:  # fmt: skip
        """Run ``attempt``. Its ranks have the variables ``added``."""
        attempt.logs.mkdir()
        try:
            spec = read_spec(attempt.spec)
        except (OSError, RecordError, KeyError, TypeError, ValueError) as error:
            now = time.time()
            outcome = make_outcome(without_spec(error), allocation, now, now)
            write_json(attempt.outcome, outcome_to_json(attempt, outcome))
            return
        ranks, variables = self._start(spec, attempt, slot_names, added)
        if self._order.tracking is not None:
            self._trackers.append(Tracker(attempt, self._order.tracking, variables, self._bundle.track_log))
        run_attempt(
            attempt, ranks, self._order.limits, allocation, lambda: self._end_request(attempt.run_id),
            is_command=spec.engine == "command", ranks_per_task=spec.ranks_per_task, before_outcome=before_outcome,
        )  # fmt: skip
        pack_if_completed(attempt, spec.parallelism.world_size)

    def _start(
        self, spec: RunSpec, attempt: AttemptPaths, slot_names: tuple[str, ...], added: Mapping[str, str]
    ) -> tuple[Ranks, Mapping[str, str]]:
        order = self._order
        if order.step is not None and self._job is not None:
            variables = {**step_variables(spec, order.environment, self._job), **added}
            return StepRanks(attempt, order.step, self._job, variables, spec.ranks_per_task), variables
        variables = local_variables(spec, order.environment, slot_names)
        return LocalRanks(attempt, spec, variables, self._servers, added), {**variables, **added}

    def _record_allocation(self) -> int:
        """Record this supervisor's allocation and return its number. Attempts that share it ran on the same devices."""
        path = self._bundle.allocations
        # A damaged line counts too, so that it cannot keep the bundle from starting again.
        number = 1 + (read_regular(path).count(b"\n") if path.exists() else 0)
        job, nodes = (self._job.job, self._job.nodes) if self._job is not None else ("", ())
        with JsonLines(path) as lines:
            line = {"allocation": number, "time": time.time(), "job": job, "nodes": nodes}
            lines.write({**line, **vars(this_process())})
        return number

    def _close_requeued(self, allocation: str) -> None:
        """Write the outcome of attempts that ran when Slurm requeued this job. All their processes have ended."""
        runs = ((self._bundle.sweep.run(run_id), k) for run_id, k in self._order.schedule)
        for attempt in (attempt for run, k in runs for attempt in run.attempts() if attempt.number >= k):
            if not attempt.has_ended:
                events = read_all_events(attempt)
                started = min((lines[0]["time"] for lines in events.values() if lines), default=time.time())
                diagnosis = diagnose_job_end("REQUEUED", last_phases(events).get(0, "init"))
                outcome = make_outcome(diagnosis, allocation, started, time.time())
                write_json(attempt.outcome, outcome_to_json(attempt, outcome))

    def _all_cancelled(self) -> bool:
        return all(self._end_request(run_id) is not None for run_id, _ in self._order.schedule)

    def _end_request(self, run_id: str) -> EndedBy | None:
        """Return who wants the run to end, or None. Slurm sends SIGTERM before it ends a job."""
        if self._asked_to_end:
            return "cancel" if self._job is None else "job"
        cancellation = read_cancellation(self._bundle)
        return "cancel" if cancellation is not None and cancellation.covers(run_id) else None

    def _end(self, _signal: int, _frame: FrameType | None) -> None:
        self._asked_to_end = True


def supervise(folder: str) -> None:
    """Supervise the bundle in ``folder`` unless another living process does.

    Raises:
        SystemExit: nothing is ordered; the bundle needs a Slurm job, but this process is in none; or another process has held
            its lock for two minutes.
    """
    # Ignore Slurm's notice before the job's end, which would end this process. The orchestrator itself retries attempts.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    bundle = BundlePaths(Path(folder).absolute())
    order = _await_order(bundle)
    job = Allocation.here() if order.step is not None else None
    if order.step is not None and job is None:
        raise SystemExit(
            f"bundle {order.bundle_id} needs a Slurm job, but this process is not in one (SLURM_JOB_ID is not set)"
        )
    deadline = time.monotonic() + (LOCK_SECONDS if job is not None else 0.0)
    while (lock := Lock.try_acquire(bundle.lock)) is None:
        if job is None:
            return
        if time.monotonic() > deadline:
            owner = holder(bundle.lock)
            whose = f"process {owner.pid} on {owner.host}" if owner else "an unknown process"
            raise SystemExit(f"bundle {order.bundle_id} has been supervised by {whose} for {LOCK_SECONDS:g} s")
        time.sleep(1.0)
    Supervisor(bundle, order, job).run()
    lock.release()


def _await_order(bundle: BundlePaths) -> BundleOrder:
    deadline = time.monotonic() + ORDER_SECONDS
    while True:
        try:
            return read_record(BundleOrder, bundle.order)
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise SystemExit(f"{bundle.order}: not there for {ORDER_SECONDS:g} s; resume the sweep") from None
        time.sleep(1.0)


if __name__ == "__main__":
    supervise(sys.argv[1])
