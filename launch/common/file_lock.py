"""Locks that show which process holds them.

The kernel's lock (flock) decides who may work; it ends with the process that holds it. The file's content (pid, start time,
boot) is for observers: the system reuses process ids, and a lock from before a reboot must not look alive.
"""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from launch.common.atomic_files import RecordError, dumps, read_json


@dataclass(frozen=True)
class Owner:
    """A process, identified by host and boot."""

    host: str
    boot: str
    pid: int
    started: int
    """Clock ticks after boot (/proc/PID/stat, field 22)."""


def this_process() -> Owner:
    return Owner(socket.gethostname(), _boot(), os.getpid(), _start_ticks(os.getpid()) or 0)


def is_alive(owner: Owner) -> bool:
    """Return whether that process still runs. A process of another host is assumed to be alive.

    The boot id shows a reboot of this host, and identifies this host if its name has changed.
    """
    if owner.boot != _boot():
        return owner.host != socket.gethostname()
    return _start_ticks(owner.pid) == owner.started


def holder(path: Path) -> Owner | None:
    """Return the living process that holds the lock at ``path``, or None."""
    owner = _last_owner(path)
    return owner if owner is not None and is_alive(owner) else None


def was_killed(path: Path) -> bool:
    """Return whether the process that held the lock at ``path`` ended without releasing it."""
    owner = _last_owner(path)
    return owner is not None and not is_alive(owner)


def _last_owner(path: Path) -> Owner | None:
    try:
        return Owner(**read_json(path))
    except (FileNotFoundError, RecordError, TypeError):
        # Never acquired, released, or its owner died before it wrote its name.
        return None


class Lock:
    """A lock held until :meth:`release` or the end of this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @staticmethod
    def try_acquire(path: Path) -> Lock | None:
        """Return the lock, or None if another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        content = dumps(asdict(this_process())).encode()
        # Overwrite what a dead owner left before truncating, so that a lock that is held is never empty.
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        return Lock(descriptor)

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
