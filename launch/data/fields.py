"""Checks of a recipe's data section, and errors about the files it names."""

from __future__ import annotations

from pathlib import Path

from launch.contract.errors import DataError
from launch.contract.spec import Data

BYTE_VALUES = 256


def check_fields(data: Data, vocab_size: int) -> None:
    """Check everything that is known before any file is opened.

    Raises:
        DataError: a field is missing, is not used by ``data.kind``, or does not fit ``vocab_size``.
    """
    _check_used(data)
    if data.kind == "text" and data.tokenizer is None and vocab_size < BYTE_VALUES:
        raise DataError(
            f"data.kind='text' without data.tokenizer makes a token of each byte and needs {BYTE_VALUES} of them, but "
            f"model.vocab_size={vocab_size}; set model.vocab_size={BYTE_VALUES} or more, or data.kind=synthetic"
        )
    if data.eod_token is not None and not 0 <= data.eod_token < vocab_size:
        raise DataError(
            f"data.eod_token={data.eod_token} is not in the vocabulary of model.vocab_size={vocab_size}; "
            f"set one of 0 to {vocab_size - 1}, or a larger model.vocab_size"
        )
    if data.packed_sequences and data.eod_token is None:
        raise DataError(
            "data.packed_sequences=true needs data.eod_token to find the ends of documents; "
            "set data.eod_token, or data.packed_sequences=false"
        )


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
        return path.read_bytes()
    except OSError as error:
        raise unreadable(name, path, error) from error
    except ValueError as error:
        # The path holds a NUL character, or one that no file system can spell.
        raise DataError(f"{name} names no file ({error}); correct the path") from error


def unreadable(name: str, path: Path, error: OSError) -> DataError:
    # An error from opening a file has its name; an error from reading does not.
    return DataError(
        f"{name} cannot be read: {error.strerror}: {error.filename or path}; correct the path, its permissions or its disk"
    )


def _check_used(data: Data) -> None:
    for field, value, kinds in (
        ("path", data.path, ("text", "indexed")),
        ("tokenizer", data.tokenizer, ("text",)),
    ):
        if value is not None and data.kind not in kinds:
            raise DataError(f"data.{field}={value!r} is not used by data.kind={data.kind}; remove it")
        if value == "":
            raise DataError(f"data.{field}='' names no file; name one, or remove the field")
        if value is not None and "\0" in value:
            raise DataError(
                f"data.{field}={value!r} names no file: a path cannot hold a NUL character; correct the path"
            )
    if data.kind == "indexed" and data.path is None:
        raise DataError("data.kind=indexed reads the pair data.path.bin and data.path.idx; set data.path")
