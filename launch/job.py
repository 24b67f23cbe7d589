"""A bundle's only supervisor: makes its attempts one after another, each as a fresh process group.

It runs on Slurm and on a laptop alike; submitit merely starts it. It alone writes outcomes. Started twice it works
once: a lock says that it lives, and an attempt whose folder exists is never made again. If it dies, its ranks die with
it (launch.lifeline) and the attempt at hand is left without an outcome, which is what "interrupted" means.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Optional

from launch import slots
from launch.attempt import Ranks, outcome_of
from launch.failures import without_spec
from launch.files import JsonLines, RecordError, read_json, read_json_lines, write_json
from launch.lock import Lock, this_process
from launch.process import Tracker
from launch.record import AttemptPaths, BundleOrder, BundlePaths, order_from_json, read_spec
from launch.spec import RunSpec

GATHER_SECONDS = 30.0
"""How long trackers may go on delivering after the bundle's last run has ended."""


class Supervisor:
    """The supervision of one bundle by this process."""

    def __init__(self, bundle: BundlePaths) -> None:
        self._bundle = bundle
        self._order: BundleOrder = order_from_json(read_json(bundle.order))
        self._asked_to_end = False
        self._trackers: list[Tracker] = []

    def run(self) -> None:
        """Make every attempt of the order that has not been begun, until asked to end."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit's notice of preemption; attempts are ours to retry
        held = slots.acquire(self._order.slot_names, self._order.slots, self._cancelled)
        if held is None:
            return
        allocation = self._note_allocation()
        for run_id, number in self._order.schedule:
            if self._cancelled():
                break
            attempt = self._bundle.sweep.run(run_id).attempt(number)
            if not attempt.root.exists():
                self._make(attempt, allocation, held.names)
        held.release()
        deadline = time.monotonic() + GATHER_SECONDS
        for tracker in self._trackers:
            tracker.finish(deadline - time.monotonic())

    def _make(self, attempt: AttemptPaths, allocation: str, slot_names: tuple[str, ...]) -> None:
        attempt.logs.mkdir(parents=True)
        try:
            spec = read_spec(attempt.spec)
        except (OSError, RecordError, KeyError, TypeError, ValueError) as error:
            write_json(attempt.outcome, asdict(outcome_of(without_spec(error), allocation, time.time())))
            return
        environment = rank_environment(spec, slot_names)
        ranks = Ranks(attempt, self._order.limits, environment)
        if self._order.tracking is not None:
            self._trackers.append(Tracker(attempt, self._order.tracking, environment))
        write_json(attempt.outcome, asdict(ranks.supervise(allocation, self._cancelled)))

    def _note_allocation(self) -> str:
        """This supervision's name: attempts that share it met the same devices, minutes apart."""
        number = 1 + sum(1 for _ in read_json_lines(self._bundle.allocations))
        with JsonLines(self._bundle.allocations) as lines:
            lines.write({"allocation": number, "time": time.time(), **asdict(this_process())})
        return f"{self._order.bundle_id}.{number}"

    def _cancelled(self) -> bool:
        return self._asked_to_end or self._bundle.cancel.exists()

    def _end(self, _signal: int, _frame: Optional[FrameType]) -> None:
        self._asked_to_end = True


def rank_environment(spec: RunSpec, slot_names: tuple[str, ...]) -> dict[str, str]:
    """The environment of a run's ranks: this process's, less its scheduler's, plus what the run says."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SUBMITIT_"))}
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, inherited.get("PYTHONPATH"))))
    devices = ",".join(slot_names) if spec.placement.device == "cuda" else ""
    return inherited | {
        "PYTHONPATH": path,
        "CUDA_VISIBLE_DEVICES": devices,
        "OMP_NUM_THREADS": str(spec.placement.threads_per_rank),
        **spec.environment,
    }


def supervise(folder: str) -> None:
    """Supervise the bundle in ``folder`` unless a living process does."""
    bundle = BundlePaths(Path(folder))
    lock = Lock.try_acquire(bundle.lock)
    if lock is None:
        return
    Supervisor(bundle).run()
    lock.release()


if __name__ == "__main__":
    supervise(sys.argv[1])
