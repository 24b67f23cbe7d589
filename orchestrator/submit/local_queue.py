"""This host's queue: a separate process that starts a sweep's bundles as slots become free.

The sweep continues after the command that started it has ended. The records alone show how a bundle ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.common.checkout import add_to_python_path
from launch.common.file_lock import Lock, holder
from launch.common.poll_interval import poll_interval
from launch.contract.bundle import BundleOrder, runs_not_begun
from launch.contract.cancellation import read_cancellation
from launch.contract.errors import OrchestratorError
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import read_plan
from launch.supervise.host_slots import slot_folders
from orchestrator.errors import SystemFault
from orchestrator.sweeps.store import bundles, read_order, report_disk_errors

POLL_SECONDS = 0.3
START_SECONDS = 60.0
"""How long a queue may take to lock queue.lock."""
MOST_STARTS = 3
"""How often a bundle may start in a row without starting an attempt. Then the queue gives up on it."""


def start_queue(sweep: SweepPaths) -> None:
    """Start this host's queue for ``sweep`` unless it already runs.

    Raises:
        SystemFault: the queue did not start.
        EnvironmentFault: this host has no folder for slots.
    """
    slot_folders()
    if holder(sweep.queue_lock) is not None:
        return
    with report_disk_errors(sweep):
        queue = _start_process("orchestrator.submit.local_queue", sweep.root, sweep.root / "queue.log")
    _wait_for_queue(sweep, queue)


def has_pending(sweep: SweepPaths) -> bool:
    """Return whether an ordered attempt has not started, and no living supervisor will start it."""
    return any(bundle.unbegun and not bundle.alive for bundle in _open_bundles(sweep))


def run_in_foreground(sweep: SweepPaths) -> None:
    """Run bundles one after another, with their supervisors in the foreground (the debug executor).

    Raises:
        EnvironmentFault: this host has no folder for slots.
    """
    slot_folders()
    for bundle in sorted(_open_bundles(sweep), key=_planned_order(sweep)):
        if not bundle.alive:
            command = [sys.executable, "-m", "launch.supervise.supervisor", str(bundle.paths.root)]
            supervisor = subprocess.Popen(command, env=add_to_python_path(os.environ))
            try:
                supervisor.wait()
            except KeyboardInterrupt:
                # The supervisor ends its run as CANCELLED.
                supervisor.terminate()
                supervisor.wait()
                raise


def _start_process(module: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=add_to_python_path(os.environ),
            start_new_session=True,
        )


def _wait_for_queue(sweep: SweepPaths, queue: subprocess.Popen[bytes]) -> None:
    """Wait until the queue holds its lock, or has finished all work and ended."""
    deadline = time.monotonic() + START_SECONDS
    while holder(sweep.queue_lock) is None:
        code = queue.poll()
        if code == 0:
            return
        if code is not None or time.monotonic() > deadline:
            how = f"ended with exit code {code}" if code is not None else f"did not start within {START_SECONDS:g} s"
            raise SystemFault(f"the queue that starts runs {how}; {sweep.root / 'queue.log'} shows why")
        time.sleep(0.05)


# --- the queue's own process ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _OpenBundle:
    """A bundle with attempts to start, or with a living supervisor."""

    paths: BundlePaths
    order: BundleOrder
    alive: bool
    unbegun: int
    """The number of ordered attempts that were neither started nor cancelled."""

    @property
    def name(self) -> str:
        return self.paths.root.name

    @property
    def progress(self) -> tuple[object, ...]:
        """A value that changes when an attempt starts or another order is written."""
        return (self.unbegun, self.order.schedule)


class Queue:
    """Starts a sweep's bundles as slots of this host become free."""

    def __init__(self, sweep: SweepPaths) -> None:
        self._sweep = sweep
        self._planned_order = _planned_order(sweep)
        self._supervisors: dict[str, subprocess.Popen[bytes]] = {}
        self._tries: dict[str, list[tuple[object, ...]]] = {}
        """Each bundle's progress at its starts since the last change."""

    def has_work(self) -> bool:
        busy, ready = self.look()
        return bool(busy or ready)

    def run_until_empty(self) -> None:
        """Start bundles until no ordered attempt can be started any more and no supervisor lives."""
        while True:
            begun = time.monotonic()
            busy, ready = self.look()
            if not busy and not ready:
                return
            used = sum(bundle.order.slots for bundle in busy)
            for bundle in ready:
                # A bundle that needs more slots than the host has starts alone, and its supervisor reports this.
                if not used or used + bundle.order.slots <= len(bundle.order.slot_names):
                    self._start(bundle)
                    used += bundle.order.slots
            time.sleep(poll_interval(time.monotonic() - begun, POLL_SECONDS))

    def look(self) -> tuple[list[_OpenBundle], list[_OpenBundle]]:
        """Return the bundles that take slots now, and those that may start."""
        found = list(_open_bundles(self._sweep))
        busy = [bundle for bundle in found if bundle.alive or self._is_starting(bundle)]
        ready = [bundle for bundle in found if bundle not in busy and bundle.unbegun and self._may_start(bundle)]
        return busy, sorted(ready, key=self._planned_order)

    def _is_starting(self, bundle: _OpenBundle) -> bool:
        supervisor = self._supervisors.get(bundle.name)
        return supervisor is not None and supervisor.poll() is None

    def _may_start(self, bundle: _OpenBundle) -> bool:
        return self._tries.get(bundle.name, []).count(bundle.progress) < MOST_STARTS

    def _start(self, bundle: _OpenBundle) -> None:
        paths = bundle.paths
        self._supervisors[bundle.name] = _start_process("launch.supervise.supervisor", paths.root, paths.log)
        self._tries[bundle.name] = [t for t in self._tries.get(bundle.name, []) if t == bundle.progress]
        self._tries[bundle.name].append(bundle.progress)


def _open_bundles(sweep: SweepPaths) -> Iterator[_OpenBundle]:
    for paths in bundles(sweep):
        order = read_order(paths)
        if order is None or order.step is not None:
            # Nothing is ordered, or the order is for Slurm.
            continue
        alive = holder(paths.lock) is not None
        unbegun = _unbegun(paths, order)
        if alive or unbegun:
            yield _OpenBundle(paths, order, alive, unbegun)


def _planned_order(sweep: SweepPaths) -> Callable[[_OpenBundle], int]:
    """Return the key that sorts bundles by their place in the plan. Those of earlier plans come last."""
    places = {bundle.bundle_id: place for place, bundle in enumerate(read_plan(sweep).bundles)}
    return lambda bundle: places.get(bundle.name, len(places))


def _unbegun(bundle: BundlePaths, order: BundleOrder) -> int:
    cancellation = read_cancellation(bundle)
    left = [
        run_id
        for run_id, number in order.schedule
        if not bundle.sweep.run(run_id).attempt(number).root.exists()
        and not (cancellation and cancellation.covers(run_id))
    ]
    return len(set(left) - runs_not_begun(bundle, order)) if left else 0


def main(folder: str) -> int:
    """Run the queue's process. Return its exit code."""
    sweep = SweepPaths(Path(folder).resolve())
    try:
        queue = Queue(sweep)
        # A command that orders more may see this queue alive just before it ends. So look for work again after releasing the
        # lock.
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
