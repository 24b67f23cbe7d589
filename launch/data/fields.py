"""Errors of the files that the data section names."""

from __future__ import annotations

from pathlib import Path

from launch.common.regular_file import read_regular
from launch.contract.errors import DataError


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
