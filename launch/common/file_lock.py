"""Locks that show which process holds them.

The kernel's lock (an open file description lock, fcntl(2)) decides which process may work and whether it lives. It ends with
the process that holds it. Any process that can open the file can test the lock without taking it. So a holder is visible from
another container, and on a network file system with locks also from another host. The file's content names the holder for
observers.

Every process that can open a lock's file could take the lock. So only the file's owner can open it (mode 0600), and links to
other files are not followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launch.common.atomic_files import FULL, dumps, parse_json
from launch.common.regular_file import open_regular

MODE = 0o600
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""struct flock: a write lock."""


@dataclass(frozen=True)
class Owner:
    """A process. ``pid`` is its id in its own container. ``token`` distinguishes it from every other process."""

    host: str
    boot: str
    pid: int
    token: str


_TOKEN = os.urandom(8).hex()
UNNAMED = Owner("", "", 0, "")
"""A holder whose name cannot be read. It belongs to another user, or had no disk space or no time yet to write its name."""


def this_process() -> Owner:
    return Owner(socket.gethostname(), _boot(), os.getpid(), _TOKEN)


def holder(path: Path) -> Owner | None:
    """Return the living process that holds the lock at ``path``, or None.

    A process of another host that did not release the lock counts as alive, because not every file system shows locks across
    hosts. It is dead if its host, by name, is this one before its last boot.
    """
    held, owner = _look(path)
    return (owner or UNNAMED) if held or _is_elsewhere(owner) else None


def was_killed(path: Path) -> bool:
    """Return whether the process that held the lock at ``path`` ended without releasing it."""
    held, owner = _look(path)
    return owner is not None and not held and not _is_elsewhere(owner)


def _look(path: Path) -> tuple[bool, Owner | None]:
    """Return whether a process holds the lock, and the last process that took it without releasing it."""
    if path.is_symlink():
        # The link may lead to a lock of another program.
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    try:
        with open_regular(path) as file:
            lock = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _WHOLE_FILE)
            return struct.unpack_from("h", lock)[0] != fcntl.F_UNLCK, _parse(file.read())
    except FileNotFoundError:
        return False, None
    except PermissionError:
        # The lock belongs to another user. Its size shows whether it was released, but not whether its holder died.
        return path.stat().st_size > 0, None


def _parse(content: bytes) -> Owner | None:
    try:
        return Owner(**parse_json(content))
    except (ValueError, TypeError):
        # The lock was never acquired, was released, or its owner died before it wrote its name.
        return None


def _is_elsewhere(owner: Owner | None) -> bool:
    return owner is not None and owner.boot != _boot() and owner.host != socket.gethostname()


class Lock:
    """A lock held until :meth:`release`, the end of a ``with`` statement or of this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @staticmethod
    def try_acquire(path: Path) -> Lock | None:
        """Return the lock, or None if another process holds it or has just deleted its file.

        Raises:
            FileNotFoundError: the folder does not exist. A lock never creates it, because its sweep may have been deleted.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, MODE)
        os.fchmod(descriptor, MODE)
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if not _is_at(path, descriptor):
            os.close(descriptor)
            return None
        _write_name(descriptor)
        return Lock(descriptor)

    @staticmethod
    def acquire(path: Path, seconds: float) -> Lock:
        """Wait for the lock and return it.

        Raises:
            TimeoutError: another process holds it for longer than ``seconds``.
            FileNotFoundError: the folder does not exist.
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


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether the open file is still the one at ``path``. Its folder may have been moved meanwhile."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_name(descriptor: int) -> None:
    """Write this process's name. On a full disk a lock has no name, so that ``prune`` can still take it and free space."""
    content = dumps(this_process()).encode()
    try:
        # Overwrite a dead owner's name before truncating, so that a held lock is never empty.
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
    except OSError as error:
        if error.errno not in FULL:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
