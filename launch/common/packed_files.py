"""Several files in one: a line of JSON, ``{name: bytes}``, and their contents in that order.

A name is a path relative to the pack's folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from launch.common.atomic_files import RecordError, amount, dumps, parse_json, write_bytes
from launch.common.regular_file import read_regular

MOST_BYTES = 1 << 20
"""The largest file to pack. Larger files stay separate: there are few, and all files of a pack are in memory at once."""


def pack(path: Path, files: Iterable[Path]) -> None:
    """Move ``files`` into the pack ``path``. No process may still write to them. Empty files are deleted.

    After a crash, each file exists, or its content is in the pack, or both. Readers look for the file first.

    Raises:
        OSError: the pack cannot be written, or a file cannot be deleted.
    """
    contents = {}
    for file in files:
        # A file that is missing or cannot be read stays as it is.
        with contextlib.suppress(OSError):
            contents[file] = read_regular(file, MOST_BYTES)
    if held := unpack(path) | {name_in(path, file): content for file, content in contents.items() if content}:
        sizes = dumps({name: len(content) for name, content in held.items()})
        write_bytes(path, b"".join((sizes.encode(), b"\n", *held.values())))
    for file in contents:
        file.unlink()
    for folder in {file.parent for file in contents} - {path.parent}:
        # A folder with other content stays.
        with contextlib.suppress(OSError):
            folder.rmdir()


def unpack(path: Path) -> dict[str, bytes]:
    """Return the files in the pack ``path`` by their names; none if there is no pack.

    Raises:
        RecordError: it is damaged.
    """
    try:
        head, _, rest = read_regular(path).partition(b"\n")
    except FileNotFoundError:
        return {}
    try:
        sizes = {name: int(amount(size, name)) for name, size in parse_json(head).items()}
    except (ValueError, AttributeError) as error:
        raise RecordError(f"{path.name}: its first line does not say what it holds ({error})") from error
    if sum(sizes.values()) != len(rest):
        raise RecordError(f"{path.name}: it holds {len(rest)} bytes, not {sum(sizes.values())} as its first line says")
    ends = accumulate(sizes.values())
    return {name: rest[end - size : end] for (name, size), end in zip(sizes.items(), ends, strict=True)}


def name_in(pack: Path, file: Path) -> str:
    """Return the name of ``file`` in ``pack``."""
    return str(file).removeprefix(f"{pack.parent}/")
