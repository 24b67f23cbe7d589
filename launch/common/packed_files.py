"""Several files in one: a line of JSON, ``{name: bytes}``, and their contents in that order.

A name is a path from the folder of the pack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from launch.common.atomic_files import RecordError, amount, dumps, parse_json, write_bytes
from launch.common.regular_file import read_regular

MOST_BYTES = 1 << 20
"""A larger file stays on its own: there are few, and all of a pack are in memory at once."""


def pack(path: Path, files: Iterable[Path]) -> None:
    """Put ``files``, to which nobody writes any more, into ``path``, and delete them. Of empty ones nothing is kept.

    A crash leaves each file, or its content in the pack, or both: readers look for the file first.

    Raises:
        OSError: the pack cannot be written, or a file not deleted.
    """
    contents = {}
    for file in files:
        # One that is not there, or cannot be read, stays as it is.
        with contextlib.suppress(OSError):
            contents[file] = read_regular(file, MOST_BYTES)
    if held := unpack(path) | {name_in(path, file): content for file, content in contents.items() if content}:
        sizes = dumps({name: len(content) for name, content in held.items()})
        write_bytes(path, b"".join((sizes.encode(), b"\n", *held.values())))
    for file in contents:
        file.unlink()
    for folder in {file.parent for file in contents} - {path.parent}:
        # A folder that holds something else stays.
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
