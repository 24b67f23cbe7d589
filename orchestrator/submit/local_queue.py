"""This host's queue: a process of its own that starts a sweep's bundles as slots become free, so that the sweep goes on
when the command that began it has gone. What became of a bundle is read from its records alone."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.common.atomic_files import write_json
from launch.common.file_lock import Lock, holder
from launch.contract.bundle import BundleOrder
from launch.contract.cancellation import read_cancellation
from launch.contract.errors import OrchestratorError
from launch.contract.paths import BundlePaths, SweepPaths
from orchestrator.errors import SystemFault
from orchestrator.slurm.command import poll_interval
from orchestrator.submit.submitit_adapter import LocalJob, start_here
from orchestrator.sweeps.store import bundles, read_order, report_disk_errors

POLL_SECONDS = 0.3
START_SECONDS = 60.0
"""How long a queue may take to say that it lives."""
MOST_STARTS = 3
"""How often in a row a bundle is started without an attempt being begun, before the queue leaves it."""


def start_queue(sweep: SweepPaths) -> None:
    """Have this host's queue work on ``sweep``; nothing happens where it already does.

    Raises:
        SystemFault: it did not start.
    """
    if holder(sweep.queue_lock) is not None:
        return
    with report_disk_errors(sweep), open(sweep.root / "queue.log", "ab") as log:
        queue = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.submit.local_queue", str(sweep.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
    _wait_for_queue(sweep, queue)


def has_pending(sweep: SweepPaths) -> bool:
    """Whether an ordered attempt has not been begun, and no living supervisor is there to begin it."""
    return any(bundle.unbegun and not bundle.alive for bundle in _open_bundles(sweep))


def run_in_foreground(sweep: SweepPaths) -> None:
    """The debug executor: bundles one after another, their supervisors in the foreground."""
    for bundle in _open_bundles(sweep):
        if not bundle.alive:
            command = [sys.executable, "-m", "launch.supervise.supervisor", str(bundle.paths.root)]
            supervisor = subprocess.Popen(command, env=_environment())
            try:
                supervisor.wait()
            except KeyboardInterrupt:
                supervisor.terminate()  # it ends its run, says that it was cancelled, and goes
                supervisor.wait()
                raise


def _environment() -> dict[str, str]:
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def _wait_for_queue(sweep: SweepPaths, queue: subprocess.Popen[bytes]) -> None:
    """Until the queue says that it lives, or has done everything and gone."""
    deadline = time.monotonic() + START_SECONDS
    while holder(sweep.queue_lock) is None:
        code = queue.poll()
        if code == 0:
            return
        if code is not None or time.monotonic() > deadline:
            how = f"ended with exit code {code}" if code is not None else f"said nothing for {START_SECONDS:g} s"
            raise SystemFault(f"the queue that starts runs {how}; {sweep.root / 'queue.log'} holds why")
        time.sleep(0.05)


# --- the queue's own process ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """One start of a bundle's supervisor, as bundles/<id>/start.json holds it."""

    token: str
    job_id: str
    time: float


@dataclass(frozen=True)
class _OpenBundle:
    """A bundle with something to begin, or with a living supervisor."""

    paths: BundlePaths
    order: BundleOrder
    alive: bool
    unbegun: int
    """Ordered attempts that nobody has begun, less those that are cancelled."""

    @property
    def name(self) -> str:
        return self.paths.root.name

    @property
    def progress(self) -> tuple[object, ...]:
        """Changes when an attempt is begun or another order is given."""
        return (self.unbegun, self.order.schedule)


class Queue:
    """Starts a sweep's bundles as slots of this host become free."""

    def __init__(self, sweep: SweepPaths) -> None:
        self._sweep = sweep
        self._jobs: dict[str, LocalJob] = {}
        self._tries: dict[str, list[tuple[object, ...]]] = {}
        """By bundle, the progress at each start since there last was any."""

    def has_work(self) -> bool:
        busy, ready = self._look()
        return bool(busy or ready)

    def run_until_empty(self) -> None:
        """Until every ordered attempt has been begun, or cannot be, and no supervisor lives."""
        while True:
            begun = time.monotonic()
            busy, ready = self._look()
            if not busy and not ready:
                return
            used = sum(bundle.order.slots for bundle in busy)
            for bundle in ready:
                # One that asks for more than there is starts alone, and its supervisor says so.
                if not used or used + bundle.order.slots <= len(bundle.order.slot_names):
                    self._start(bundle)
                    used += bundle.order.slots
            time.sleep(poll_interval(time.monotonic() - begun, POLL_SECONDS))

    def _look(self) -> tuple[list[_OpenBundle], list[_OpenBundle]]:
        """Bundles that take slots now, and those that may be started."""
        found = list(_open_bundles(self._sweep))
        busy = [bundle for bundle in found if bundle.alive or self._is_starting(bundle)]
        ready = [bundle for bundle in found if bundle not in busy and bundle.unbegun and self._may_start(bundle)]
        return busy, ready

    def _is_starting(self, bundle: _OpenBundle) -> bool:
        job = self._jobs.get(bundle.name)
        return job is not None and job.is_starting()

    def _may_start(self, bundle: _OpenBundle) -> bool:
        return self._tries.get(bundle.name, []).count(bundle.progress) < MOST_STARTS

    def _start(self, bundle: _OpenBundle) -> None:
        token = secrets.token_hex(4)
        job = self._jobs[bundle.name] = start_here(bundle.paths, token)
        self._tries[bundle.name] = [t for t in self._tries.get(bundle.name, []) if t == bundle.progress]
        self._tries[bundle.name].append(bundle.progress)
        write_json(bundle.paths.start, asdict(Start(token, job.job_id, time.time())))


def _open_bundles(sweep: SweepPaths) -> Iterator[_OpenBundle]:
    for paths in bundles(sweep):
        order = read_order(paths)
        if order is None or order.step is not None:
            continue  # nothing to make, or Slurm's
        alive = holder(paths.lock) is not None
        unbegun = _unbegun(paths, order.schedule)
        if alive or unbegun:
            yield _OpenBundle(paths, order, alive, unbegun)


def _unbegun(bundle: BundlePaths, schedule: Sequence[tuple[str, int]]) -> int:
    cancellation = read_cancellation(bundle)
    wanted = [(run_id, number) for run_id, number in schedule if not (cancellation and cancellation.covers(run_id))]
    return sum(not bundle.sweep.run(run_id).attempt(number).root.exists() for run_id, number in wanted)


def main(folder: str) -> int:
    """The queue's own process; the value is its exit code."""
    sweep = SweepPaths(Path(folder).resolve())
    queue = Queue(sweep)
    try:
        # Whoever orders more looks for a living queue first. It may look just before this one goes, so look again after.
        while queue.has_work():
            lock = Lock.try_acquire(sweep.queue_lock)
            if lock is None:
                return 0
            try:
                queue.run_until_empty()
            finally:
                lock.release()
    except (OrchestratorError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
