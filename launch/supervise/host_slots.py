"""A host's slots: its GPUs, or its CPU cores.

A slot is a locked file in a folder of the user on this host. So two sweeps of one user never share a GPU, whatever the
environment of their shells. A slot is free as soon as its holder dies.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.common.file_lock import Lock, holder
from launch.contract.errors import EnvironmentFault
from launch.contract.paths import BundlePaths

POLL_SECONDS = 0.2
VARIABLE = "ORCHESTRATOR_SLOTS"
"""The environment variable for another folder of slots, for example one that containers share."""
TEMPORARY = "/tmp"
"""The folder for temporary files. $TMPDIR will not do, because it differs between shells."""


class Slots:
    """Slots that are held until :meth:`release` or the end of this process."""

    def __init__(self, names: tuple[str, ...], locks: list[Lock]) -> None:
        self.names = names
        self._locks = locks

    def release(self) -> None:
        _release(self._locks)


def acquire(names: Sequence[str], count: int, give_up: Callable[[], bool]) -> Slots | None:
    """Wait for ``count`` of the slots ``names``. Return None once ``give_up`` returns True.

    Raises:
        ValueError: the host has fewer than ``count`` slots.
    """
    if count > len(names):
        raise ValueError(f"the bundle needs {count} slots, but this host has {len(names)}: {', '.join(names)}")
    if count == 0:
        # Under Slurm, the bundle has its allocation to itself.
        return Slots((), [])
    while not give_up():
        slots = _try_acquire(names, count)
        if slots is not None:
            return slots
        time.sleep(POLL_SECONDS)
    return None


def _try_acquire(names: Sequence[str], count: int) -> Slots | None:
    folders = slot_folders()
    # Only one bundle at a time takes slots. Otherwise two waiting bundles could each hold half of the slots that they need.
    entry = _try_lock(folders, "door")
    if entry is None:
        return None
    held: dict[str, list[Lock]] = {}
    for name in names:
        locks = _try_lock(folders, name) if len(held) < count else None
        if locks is not None:
            held[name] = locks
    slots = Slots(tuple(held), [lock for locks in held.values() for lock in locks])
    _release(entry)
    if len(held) == count:
        return slots
    slots.release()
    return None


def _try_lock(folders: Sequence[Path], name: str) -> list[Lock] | None:
    """Return the locks of that name in all folders, or None if another process holds one of them."""
    locks: list[Lock] = []
    for folder in folders:
        lock = Lock.try_acquire(folder / name)
        if lock is None:
            _release(locks)
            return None
        locks.append(lock)
    return locks


def _release(locks: Sequence[Lock]) -> None:
    for lock in locks:
        lock.release()


def slot_folders() -> list[Path]:
    """Create and return the folders of this user's slots. A slot is held in all of them.

    One folder is not enough. The login's folder (XDG_RUNTIME_DIR) disappears when the user logs out, and some sessions have
    none. In the temporary folder, another user may have taken the name.

    Raises:
        EnvironmentFault: none of them belongs to this user.
    """
    own = os.environ.get(VARIABLE)
    places = [own] if own else [os.environ.get("XDG_RUNTIME_DIR"), TEMPORARY]
    folders = [Path(place) / f"orchestrator-slots-{os.getuid()}" for place in places if place and Path(place).is_dir()]
    private = [folder for folder in folders if _is_private(folder)]
    if not private:
        found = (
            f"{folders[-1]} is a link, or belongs to another user: remove it"
            if folders
            else f"{places[-1]} is not a folder: create it"
        )
        raise EnvironmentFault(
            f"this host's slots need a folder of your own; {found}, or set {VARIABLE} in every shell to a folder that you own"
        )
    return private


def _is_private(folder: Path) -> bool:
    """Return whether ``folder`` belongs to this user and is not a link. Create it, and deny other users access."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return True


@dataclass(frozen=True)
class HeldSlot:
    """A slot and the supervisor that holds it."""

    name: str
    pid: int
    since: float
    """In seconds since the epoch."""
    bundle: BundlePaths


def held_slots(names: Sequence[str]) -> Iterator[HeldSlot]:
    """Yield each of the slots ``names`` that a supervisor holds."""
    for name in names:
        for path in (folder / name for folder in slot_folders()):
            owner = holder(path)
            # The holder's last argument is the bundle. The holder may end while this reads.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = os.fsdecode(Path(f"/proc/{owner.pid}/cmdline").read_bytes()).split("\0") if owner else []
                if owner and "launch.supervise.supervisor" in words:
                    yield HeldSlot(name, owner.pid, path.stat().st_mtime, BundlePaths(Path(words[-2])))
                    break
