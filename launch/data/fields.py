"""The files that the data section names, and their errors. Without numpy: a plan looks at them too."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from launch.common.regular_file import read_regular
from launch.contract.errors import DataError
from launch.contract.spec import Data

TEXT_SUFFIXES = (".py", ".txt")


def check_length(name: str, held: int, length: int) -> None:
    """Check that a stream of ``held`` tokens is at least ``length`` tokens long.

    Raises:
        DataError: it is shorter.
    """
    if held < length:
        raise DataError(
            f"{name} holds {held} tokens, fewer than the {length} of one sequence; use a longer text, or lower "
            f"training.sequence_length"
        )


def read_bytes(name: str, path: Path) -> bytes:
    """Read ``path``. ``name`` is the field that names it, with its value.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return read_regular(path)
    except OSError as error:
        raise unreadable(name, path, error) from error
    except ValueError as error:
        # The path contains a NUL character, or one that cannot be encoded.
        raise DataError(f"{name} names no file ({error}); correct the path") from error


def unreadable(name: str, path: Path, error: OSError) -> DataError:
    # An error from opening a file has the file's name; an error from reading does not.
    return DataError(
        f"{name} cannot be read: {error.strerror}: {error.filename or path}; correct the path, its permissions or its disk"
    )


def text_files(data: Data) -> list[Path]:
    """Return the files that ``data`` names, sorted by name.

    Raises:
        DataError: there are none, or the path cannot be read.
    """
    name = source_of(data)
    root = Path(data.path or sysconfig.get_path("stdlib"))
    suffixes = TEXT_SUFFIXES if data.path else (".py",)
    try:
        if root.is_file():
            return [root]
        if not root.is_dir():
            raise DataError(f"{name} is neither a file nor a folder; correct the path, or remove it")
        files = sorted(file for file in root.iterdir() if file.suffix in suffixes and file.is_file())
    except OSError as error:
        raise unreadable(name, root, error) from error
    if not files:
        raise DataError(f"{name} holds no *{' or *'.join(suffixes)} file; name a file or a folder with such files")
    return files


def source_of(data: Data) -> str:
    return f"data.path={data.path!r}" if data.path else "the source of Python's standard library"
