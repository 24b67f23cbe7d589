"""A host's slots: its GPUs, or its CPU cores.

A slot is a locked file in the host's temporary folder, so that two sweeps of one user never share a GPU. A slot whose
holder died is free at once.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launch.common.file_lock import Lock

POLL_SECONDS = 0.2


class Slots:
    """Slots that are held until :meth:`release` or the end of this process."""

    def __init__(self, names: tuple[str, ...], locks: list[Lock]) -> None:
        self.names = names
        self._locks = locks

    def release(self) -> None:
        for lock in self._locks:
            lock.release()


def acquire(names: Sequence[str], count: int, give_up: Callable[[], bool]) -> Slots | None:
    """Wait for ``count`` of the slots ``names``; return None once ``give_up`` is true.

    Raises:
        ValueError: the host has fewer than ``count`` slots.
    """
    if count > len(names):
        raise ValueError(f"the bundle needs {count} slots, but this host has {len(names)}: {', '.join(names)}")
    if count == 0:
        # A Slurm allocation is the bundle's alone.
        return Slots((), [])
    while not give_up():
        slots = _try_acquire(names, count)
        if slots is not None:
            return slots
        time.sleep(POLL_SECONDS)
    return None


def _try_acquire(names: Sequence[str], count: int) -> Slots | None:
    folder = Path(tempfile.gettempdir()) / f"orchestrator-slots-{os.getuid()}"
    # One bundle at a time takes slots, so that two waiting bundles never hold half of what each needs.
    entry = Lock.try_acquire(folder / "door")
    if entry is None:
        return None
    held: list[tuple[str, Lock]] = []
    try:
        for name in names:
            lock = Lock.try_acquire(folder / name)
            if lock is not None:
                held.append((name, lock))
            if len(held) == count:
                return Slots(tuple(name for name, _ in held), [lock for _, lock in held])
    finally:
        entry.release()
    for _, lock in held:
        lock.release()
    return None
