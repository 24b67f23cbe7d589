"""Read only regular files, because a FIFO makes its reader wait and a device may never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from launch.common.text import size


def open_regular(path: Path) -> BinaryIO:
    """Open ``path`` for reading.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    return open(_open(path)[0], "rb")


def _open(path: Path | str) -> tuple[int, int]:
    """Return a descriptor of the file, and its size in bytes."""
    # Without O_NONBLOCK, opening a FIFO waits for a writer. For a regular file the flag changes nothing.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        # A socket cannot be opened at all.
        if error.errno != errno.ENXIO:
            raise
        raise not_regular(path) from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status.st_size
    os.close(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise not_regular(path)


def not_regular(path: Path | str) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path | str, most_bytes: int | None = None) -> bytes:
    """Return the content of ``path``.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger than ``most_bytes``.
    """
    # A file object makes twice as many system calls, and a store has thousands of records.
    descriptor, length = _open(path)
    try:
        if most_bytes is not None and length > most_bytes:
            raise OSError(errno.EFBIG, f"larger than {size(most_bytes)}", str(path))
        content = piece = os.read(descriptor, length + 1)
        # One byte more than the file's length was requested. So if exactly this length was read, the file has ended.
        while piece and len(content) != length:
            content += (piece := os.read(descriptor, 1 << 12))
        return content
    finally:
        os.close(descriptor)


class AppendedLines:
    """Reads each complete line of a growing file once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[bytes]:
        """Return the lines since the last call. Leave an incomplete last line to the next call."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                whole, end, _torn = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole + end)
        return whole.splitlines()
