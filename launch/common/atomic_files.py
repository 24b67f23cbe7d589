"""How records reach the disk: whole files by writing beside and renaming, growing files a JSON line at a time.

A crash at any byte loses at most the last line of a growing file and nothing of a whole one. Numbers keep full
precision. NaN and the infinities are written as strings, which no JSON reader refuses and none can take for a number
by accident; :func:`number` turns them back. Half of a surrogate pair, which UTF-8 cannot hold and an exception's message
may, is written as its escape: in JSON it is read back as it was.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What writing fails with where there is no room: on the disk, in a quota, or within the shell's limit (ulimit -f)."""


class RecordError(Exception):
    """A record on disk cannot be read as what it should be. The message names the file and the place in it."""


def encode(value: Any) -> Any:
    """``value`` with every non-finite float replaced by the string "NaN", "Infinity" or "-Infinity"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def number(value: float | str) -> float:
    """The float that :func:`encode` wrote, as a number or as one of its three strings."""
    return float(value)


def dumps(value: Any, indent: int | None = None) -> str:
    text = json.dumps(encode(value), indent=indent, allow_nan=False, ensure_ascii=False)
    return _utf8(text).decode()


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step: a reader sees the old file or the new one, never half of either."""
    write_bytes(path, _utf8(text))


def _utf8(text: str) -> bytes:
    return text.encode(errors="backslashreplace")  # the escape is JSON's own


def write_bytes(path: Path, content: bytes, *, sync: bool = True) -> None:
    """As :func:`write_text`. Without ``sync`` a power failure may still lose it: the caller sees to many at once."""
    with atomic_open(path, sync=sync) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_open(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A file to write to that takes the place of ``path`` once the block has ended well: for what is more than should be
    in memory at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def iter_json_object(content: Mapping[str, Any]) -> Iterator[str]:
    """``content`` as a JSON object, piece by piece: of a member that is a list, or an iterator of what is too much to be in
    memory at once, each item is a line."""
    opening = "{"
    for name, value in content.items():
        yield f"{opening}\n {dumps(name)}: "
        if isinstance(value, (list, tuple, Iterator)):
            yield from _items(value)
        else:
            yield dumps(value, indent=1).replace("\n", "\n ")
        opening = ","
    yield "{}\n" if opening == "{" else "\n}\n"


def _items(values: Iterable[Any]) -> Iterator[str]:
    opening = "["
    for value in values:
        yield f"{opening}\n  {dumps(value)}"
        opening = ","
    yield "[]" if opening == "[" else "\n ]"


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    write_bytes(path, (dumps(value, indent=1) + "\n").encode(), sync=sync)


def sync_file_system(folder: Path) -> None:
    """Return once everything written to the file system of ``folder`` would outlast a power failure (syncfs(2)): one
    call for many files, names and folders included.

    Raises:
        OSError: some of it could not be written.
    """
    import ctypes  # only here: what only reads does without

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """The value in ``path``.

    Raises:
        FileNotFoundError: there is no such file.
        RecordError: it holds something other than JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise RecordError(f"{path.name}: not JSON ({error})") from error


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in ``path``, none where it does not exist. A torn last line (a crash mid-write) is left out.

    Raises:
        RecordError: a line before the last is not JSON.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    whole, _, _torn = content.rpartition(b"\n")
    for index, line in enumerate(whole.split(b"\n") if whole else ()):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise RecordError(f"{path.name}: line {index + 1} is not JSON ({error})") from error


class JsonLines:
    """The one writer of a growing file. Each line reaches the kernel before :meth:`write` returns.

    Where only a part of a line could be written (a full disk), nothing is written after it: the torn line stays last.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)

    def write(self, value: Mapping[str, Any]) -> None:
        line = (dumps(value) + "\n").encode()
        written = self._file.write(line)
        if written != len(line):
            self._file.close()
            short = f"only {written} of {len(line)} bytes of a line could be written"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {short}")

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
