"""Locks that show which process holds them.

The kernel's lock (flock) decides who may work; it ends with the process that holds it. The file's content (pid, start time,
boot) is for observers: the system reuses process ids, and a lock from before a reboot must not look alive.

Whoever can open a lock's file can hold the lock. So only its owner can (mode 0600), and no link is followed to another file.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launch.common.atomic_files import RecordError, dumps, read_json

MODE = 0o600


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
    except PermissionError:
        # Another user's lock. Its size shows whether it was released, but not whether its holder died.
        return Owner("", "", 0, 0) if path.stat().st_size else None


class Lock:
    """A lock held until :meth:`release`, the end of a ``with`` statement or of this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @staticmethod
    def try_acquire(path: Path) -> Lock | None:
        """Return the lock, or None if another process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, MODE)
        os.fchmod(descriptor, MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        content = dumps(this_process()).encode()
        # Overwrite what a dead owner left before truncating, so that a lock that is held is never empty.
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        return Lock(descriptor)

    @staticmethod
    def acquire(path: Path, seconds: float) -> Lock:
        """Wait for the lock and return it.

        Raises:
            TimeoutError: another process holds it for longer than ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while (lock := Lock.try_acquire(path)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has held {path.name} for {seconds:g} s")
            time.sleep(0.05)
        return lock

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.release()


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
