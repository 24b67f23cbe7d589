"""How records reach the disk: whole files by writing beside and renaming, growing files a JSON line at a time.

A crash at any byte loses at most the last line of a growing file and nothing of a whole one. Numbers keep full
precision. NaN and the infinities are written as strings, which no JSON reader refuses and none can take for a number
by accident; :func:`number` turns them back.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


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
    return json.dumps(encode(value), indent=indent, allow_nan=False, ensure_ascii=False)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step: a reader sees the old file or the new one, never half of either."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, *, sync: bool = True) -> None:
    """As :func:`write_text`. Without ``sync`` a power failure may still lose it: the caller sees to many at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, *, sync: bool = True) -> None:
    write_bytes(path, (dumps(value, indent=1) + "\n").encode(), sync=sync)


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
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes of a line could be written")

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
