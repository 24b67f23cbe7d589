"""Write records to disk: whole files atomically by rename, growing files one JSON line at a time.

A crash at any byte loses at most the last line of a growing file, and nothing of a whole one. Numbers keep full precision.
NaN and the infinities are written as strings, which every JSON reader accepts; :func:`number` reads them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from launch.common.regular_file import not_regular, read_regular

MOST_JSON_BYTES = 2 << 30
"""The largest JSON file to read. A plan of 100,000 runs has some hundred MiB."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a write that finds no space on the disk, in a quota, or within the shell's limit (ulimit -f)."""


MISPLACED = (errno.EISDIR, errno.ELOOP)
"""Error numbers of a path that is a folder or a link instead of a file."""
_FIXES = {
    **dict.fromkeys(FULL, "free space there"),
    errno.EISDIR: "it must be a file: move the folder away",
    errno.ENOTDIR: "it, or a part of it, must be a folder: move the file away",
    errno.ELOOP: "it must not be a link: delete the link",
}
"""The fix by error number."""


def explain(error: Exception) -> str:
    """Return the message of ``error``, with the path and the fix if they are known."""
    if not isinstance(error, OSError) or error.errno not in _FIXES:
        return str(error)
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror}; {_FIXES[error.errno]}"


class RecordError(Exception):
    """A record on disk is not as it should be. The message names the file and the place in it."""


def members(record: Any, *names: str) -> dict[str, Any]:
    """Return the fields of a dataclass by name, unconverted; with ``names`` only these fields and properties."""
    return {name: getattr(record, name) for name in names or record.__dataclass_fields__}


NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_PLAIN = {str, int, bool, type(None)}


def encode(value: Any) -> Any:
    """Return ``value`` as a JSON value: dataclasses as objects, and floats that are not finite as :data:`NOT_FINITE`."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _named(value)
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, (dict, Mapping)):  # A dict is recognized sooner than a Mapping.
        return {str(key): encode(item) for key, item in value.items()}
    return encode(members(value)) if hasattr(value, "__dataclass_fields__") else value


def _named(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def number(value: float | str) -> float:
    """Return the float that :func:`encode` wrote as a number or as one of its three strings.

    Raises:
        TypeError: ``value`` is something else.
    """
    if type(value) not in (float, int) and value not in NOT_FINITE:
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def amount(value: Any, name: str = "a figure") -> float:
    """Return ``value`` if it is a finite number of at least 0.

    Raises:
        ValueError: it is something else. The message has the field's ``name``.
    """
    if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value!r}, not a number of at least 0")
    return float(value)


_LINES = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
"""Made only once, because a line is written in every step."""


def dumps(value: Any, indent: int | None = None) -> str:
    plain = encode(value)
    text = (
        _LINES.encode(plain)
        if indent is None
        else json.dumps(plain, indent=indent, allow_nan=False, ensure_ascii=False)
    )
    return _utf8(text).decode()


def write_text(path: Path, text: str) -> None:
    """Replace the file ``path`` atomically, so that a reader sees either the old file or the new one."""
    write_bytes(path, _utf8(text))


def _utf8(text: str) -> bytes:
    # An exception's message may contain half of a surrogate pair, which UTF-8 cannot encode. Its escape is valid JSON.
    return text.encode(errors="backslashreplace")


def write_bytes(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Replace ``path`` like :func:`write_text`. Without ``sync`` the caller has to call :func:`sync_file_system`."""
    with atomic_open(path, sync=sync) as file:
        file.write(content)


@contextlib.contextmanager
def atomic_open(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file that replaces ``path`` when the block ends without an error. Use it for content too large for memory.

    Raises:
        OSError: it cannot be written, or ``path`` is a device or a FIFO, which must not be replaced.
    """
    if path.exists() and not path.is_file():
        raise not_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes of different hosts or containers may have the same pid.
    staged = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with open(staged, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException as error:
        staged.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(staged):
            error.filename = str(path)
        raise


def iter_json_object(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield ``content`` as the text of a JSON object. A member that is a list or an iterator gets one line per item."""
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
    """Make everything written to the file system of ``folder`` survive a power failure (syncfs(2)).

    One call covers many files, with their names and folders.

    Raises:
        OSError: some of it could not be written.
    """
    # Imported here because readers do not need it.
    import ctypes

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)


def parse_json(content: bytes) -> Any:
    """Return the JSON value in ``content``.

    Raises:
        ValueError: it is not JSON, or is nested too deeply to be a record.
    """
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path | str) -> Any:
    """Read the JSON value in ``path``.

    Raises:
        FileNotFoundError: the file does not exist.
        RecordError: the file does not contain JSON.
    """
    return parse_record(read_regular(path, MOST_JSON_BYTES), path)


def parse_record(content: bytes, path: Path | str) -> Any:
    """Return the JSON value in ``content``, the content of the file ``path``.

    Raises:
        RecordError: it is not JSON.
    """
    try:
        return parse_json(content)
    except ValueError as error:
        raise RecordError(f"{Path(path).name}: not JSON ({error})") from error


def read_json_lines(path: Path, read: Callable[[Path], bytes] = read_regular) -> Iterator[dict[str, Any]]:
    """Yield the objects in ``path``, or none if it does not exist. Leave out a torn last line, from a crash while writing.

    Raises:
        RecordError: a line before the last is not JSON.
    """
    try:
        content = read(path)
    except FileNotFoundError:
        return
    whole, _, _torn = content.rpartition(b"\n")
    for index, line in enumerate(whole.split(b"\n") if whole else ()):
        try:
            yield parse_json(line)
        except ValueError as error:
            raise RecordError(f"{path.name}: line {index + 1} is not JSON ({error})") from error


class JsonLines:
    """The only writer of a growing file. Each line reaches the kernel before :meth:`write` returns.

    After a partial write (a full disk) the file is closed, so that the torn line stays the last one.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)
        # Remove a torn line of an earlier writer, which would spoil the first new line.
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def write(self, value: Any) -> None:
        self.write_line(dumps(value))

    def write_line(self, text: str) -> None:
        """Write ``text``, which is JSON in one line."""
        line = (text + "\n").encode()
        written = self._file.write(line)
        if written != len(line):
            self._file.close()
            short = f"only {written} of {len(line)} bytes of a line could be written"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {short}")

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
