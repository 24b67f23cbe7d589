"""How bundles are started: the only module that knows submitit.

On this host a queue of its own process starts them, so that a sweep goes on when the command that began it has gone.
submitit's local executor starts each supervisor and is asked nothing afterwards: it reports every ending as FINISHED
and has no queue, so what became of a bundle is read from its records alone.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import submitit

from launch.files import read_json, write_json
from launch.job import supervise
from launch.lock import Lock, holder
from launch.record import BundleOrder, BundlePaths, SweepPaths, order_from_json

POLL_SECONDS = 0.3
START_SECONDS = 60.0
"""How long a started supervisor may take to say that it lives."""
MOST_STARTS = 3
"""How often a bundle is started by one queue: a supervisor that dies each time is not started for ever."""


def start_queue(sweep: SweepPaths) -> None:
    """Have this host's queue work on ``sweep``; nothing happens where it already does."""
    if holder(sweep.queue_lock) is not None:
        return
    sweep.root.mkdir(parents=True, exist_ok=True)
    with open(sweep.root / "queue.log", "ab") as log:
        subprocess.Popen(
            [sys.executable, "-m", "orchestrator.submit", str(sweep.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (_source(), os.environ.get("PYTHONPATH"))))},
            start_new_session=True,
        )
    _wait_for_queue(sweep)


def has_pending(sweep: SweepPaths) -> bool:
    """Whether an ordered attempt has not been begun, and no living supervisor is there to begin it."""
    return any(_pending(sweep))


def run_in_foreground(sweep: SweepPaths) -> None:
    """The debug executor: bundles one after another, their supervisors in the foreground."""
    for bundle in _pending(sweep):
        subprocess.run(
            [sys.executable, "-m", "launch.job", str(bundle.root)],
            env={**os.environ, "PYTHONPATH": _source()},
            check=False,
        )


@dataclass(frozen=True)
class Start:
    """One start of a bundle's supervisor, as bundles/<id>/submission.json holds it."""

    token: str
    executor: str
    job_id: str
    time: float


class Queue:
    """Starts a sweep's bundles as slots of this host become free."""

    def __init__(self, sweep: SweepPaths) -> None:
        self._sweep = sweep
        self._starts: dict[str, list[float]] = {}

    def has_work(self) -> bool:
        return any(self._may_start(bundle) for bundle in _pending(self._sweep))

    def drain(self) -> None:
        """Until every ordered attempt has been begun, or cannot be."""
        while True:
            pending = list(_pending(self._sweep))
            busy = [bundle for bundle in pending if self._is_starting(bundle)] + list(_alive(self._sweep))
            ready = [bundle for bundle in pending if self._may_start(bundle)]
            if not busy and not ready:
                return
            used = sum(_order(bundle).slots for bundle in busy)
            for bundle in ready:
                order = _order(bundle)
                if used + order.slots <= len(order.slot_names):
                    self._start(bundle, order)
                    used += order.slots
            time.sleep(POLL_SECONDS)

    def _may_start(self, bundle: BundlePaths) -> bool:
        return not self._is_starting(bundle) and len(self._starts.get(bundle.root.name, ())) < MOST_STARTS

    def _is_starting(self, bundle: BundlePaths) -> bool:
        starts = self._starts.get(bundle.root.name, [])
        recent = bool(starts) and time.monotonic() - starts[-1] < START_SECONDS
        return recent and holder(bundle.lock) is None

    def _start(self, bundle: BundlePaths, order: BundleOrder) -> None:
        executor = submitit.LocalExecutor(folder=self._sweep.root / "submitit")
        minutes = 1 + len(order.schedule) * order.limits.run_seconds / 60
        executor.update_parameters(timeout_min=int(minutes) * 2, name=order.bundle_id)
        token = secrets.token_hex(4)
        job = executor.submit(supervise, str(bundle.root))
        self._starts.setdefault(bundle.root.name, []).append(time.monotonic())
        write_json(bundle.submission, asdict(Start(token, "local", str(job.job_id), time.time())))


def _pending(sweep: SweepPaths) -> Iterator[BundlePaths]:
    """Bundles with an ordered attempt that nobody has begun, and no living supervisor."""
    for path in sorted(sweep.root.glob("bundles/*/bundle.json")):
        bundle = BundlePaths(path.parent)
        if bundle.cancel.exists() or holder(bundle.lock) is not None:
            continue
        if any(not sweep.run(run_id).attempt(number).root.exists() for run_id, number in _order(bundle).schedule):
            yield bundle


def _alive(sweep: SweepPaths) -> Iterator[BundlePaths]:
    for path in sweep.root.glob("bundles/*/bundle.json"):
        if holder(path.parent / "lock") is not None:
            yield BundlePaths(path.parent)


def _order(bundle: BundlePaths) -> BundleOrder:
    return order_from_json(read_json(bundle.order))


def _source() -> str:
    return str(Path(__file__).resolve().parent.parent)


def _wait_for_queue(sweep: SweepPaths) -> None:
    """Until the queue says that it lives, or has nothing left to do and has gone."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and holder(sweep.queue_lock) is None and any(_pending(sweep)):
        time.sleep(0.05)


def main(folder: str) -> None:
    """The queue's own process."""
    sweep = SweepPaths(Path(folder).resolve())
    queue = Queue(sweep)
    # Whoever orders more looks for a living queue first. It may look just before this one goes, so look again after.
    while queue.has_work():
        lock = Lock.try_acquire(sweep.queue_lock)
        if lock is None:
            return
        queue.drain()
        lock.release()


if __name__ == "__main__":
    main(sys.argv[1])
