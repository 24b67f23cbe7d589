"""Megatron-Core's IndexedDataset: tokens in a ``.bin`` file, and the place of each sequence in an ``.idx`` file.

The format is that of megatron.core.datasets.indexed_dataset (``_IndexWriter``, megatron-core 0.16), little-endian:
the magic, the version as uint64, the token type as uint8, the numbers of sequences and of document borders as uint64; then
each sequence's length in tokens as int32, its first byte in the ``.bin`` as int64, and the sequences at which documents begin
and end as int64. A multimodal pair continues with a mode for each sequence.

Sequences are contiguous in the ``.bin``, so the whole file is one stream of tokens. Nothing here reads document borders.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from launch.common.file_digest import sampled_digest
from launch.contract.errors import DataError
from launch.data.fields import unreadable

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
"""Token types by their code in the header."""

LENGTH, POINTER = np.dtype("<i4"), np.dtype("<i8")
BORDER_BYTES = 8
CHUNK = 1 << 20
"""The number of index entries checked at once. It limits memory to a few dozen MiB for any index."""

FIX = "copy the pair again, or rewrite it with Megatron's tools/preprocess_data.py"


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """A pair of files that has passed all checks."""

    path: str
    """The path of both files without their suffix."""
    tokens: npt.NDArray[np.integer[Any]]
    """The memory-mapped stream: shape (tokens,), in the file's own type."""

    @property
    def name(self) -> str:
        return f"data.path={self.path!r}"

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal digits, of the whole ``.idx`` and of samples of the ``.bin``
        (:func:`launch.common.file_digest.sampled_digest`).

        Raises:
            DataError: a file can no longer be read.
        """
        try:
            with open(f"{self.path}.idx", "rb") as index:
                whole = hashlib.file_digest(index, "sha256").hexdigest()
            sampled = sampled_digest(Path(f"{self.path}.bin"))
        except OSError as error:
            raise unreadable(self.name, Path(self.path), error) from error
        return hashlib.sha256(f"{whole} {sampled}".encode()).hexdigest()


@dataclass(frozen=True)
class _Index:
    """An open ``.idx`` file and its header."""

    file: BinaryIO
    name: str
    """The text with which error messages begin."""
    dtype: np.dtype[Any]
    sequences: int
    borders: int

    @property
    def expected_bytes(self) -> int:
        return HEADER.size + self.sequences * (LENGTH.itemsize + POINTER.itemsize) + self.borders * BORDER_BYTES

    def lengths(self, first: int, count: int) -> npt.NDArray[np.int64]:
        return self._entries(LENGTH, HEADER.size, first, count)

    def pointers(self, first: int, count: int) -> npt.NDArray[np.int64]:
        return self._entries(POINTER, HEADER.size + self.sequences * LENGTH.itemsize, first, count)

    def _entries(self, dtype: np.dtype[Any], start: int, first: int, count: int) -> npt.NDArray[np.int64]:
        self.file.seek(start + first * dtype.itemsize)
        return np.frombuffer(self.file.read(count * dtype.itemsize), dtype).astype(np.int64)


def open_pair(path: str) -> IndexedDataset:
    """Open the pair ``path``.bin and ``path``.idx, and check that they fit each other, without reading the ``.bin``.

    Raises:
        DataError: a file is missing or unreadable, the ``.idx`` has another format or contradicts itself, its
            tokens are not integers, or the ``.bin`` has a different size than the index says.
    """
    name = f"data.path={path!r}"
    if path.endswith((".bin", ".idx")):
        raise DataError(f"{name} names one file of a pair; name both without the suffix: data.path={path[:-4]!r}")
    try:
        bin_bytes = _size(name, Path(f"{path}.bin"))
        idx_bytes = _size(name, Path(f"{path}.idx"))
        with open(f"{path}.idx", "rb") as file:
            index = _read_header(file, f"{name}: its .idx", idx_bytes)
            _check_size(index, idx_bytes)
            _check_sequences(index, bin_bytes)
        return IndexedDataset(path, np.memmap(f"{path}.bin", index.dtype, mode="r"))
    except OSError as error:
        raise unreadable(name, Path(path), error) from error


def _size(name: str, path: Path) -> int:
    if not path.exists():
        raise DataError(
            f"{name} needs {path}, which is missing; name the pair without .bin and .idx, and keep both files"
        )
    if not path.is_file():
        raise DataError(f"{name} needs {path}, which is not a file; name the pair without .bin and .idx")
    return path.stat().st_size


def _read_header(file: BinaryIO, name: str, idx_bytes: int) -> _Index:
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(
            f"{name} is truncated: its header takes {HEADER.size} bytes, but the file has {idx_bytes}; {FIX}"
        )
    magic, version, code, sequences, borders = HEADER.unpack(header)
    if magic != MAGIC:
        raise DataError(
            f"{name} begins with {magic!r}, not with {MAGIC!r}, so it is not an index of Megatron-Core; {FIX}"
        )
    if version != VERSION:
        raise DataError(f"{name} has version {version}, but only {VERSION} is known; {FIX}")
    if code not in TYPES:
        raise DataError(f"{name} gives its tokens the unknown type {code}; 1 to {len(TYPES)} are known; {FIX}")
    dtype = np.dtype(TYPES[code]).newbyteorder("<")
    if dtype.kind == "f":
        raise DataError(f"{name} holds numbers of type {TYPES[code]}, but tokens are integers; name a pair of tokens")
    return _Index(file, name, dtype, sequences, borders)


def _check_size(index: _Index, idx_bytes: int) -> None:
    surplus = idx_bytes - index.expected_bytes
    if index.sequences and surplus == index.sequences:
        raise DataError(
            f"{index.name} belongs to a multimodal pair: {index.expected_bytes} bytes are followed by a mode for each of "
            f"{index.sequences} sequences; name a pair that holds text only"
        )
    if surplus:
        raise DataError(
            f"{index.name} is {'truncated' if surplus < 0 else 'too long'}: {index.sequences} sequences and "
            f"{index.borders} document borders take {index.expected_bytes} bytes, but the file has {idx_bytes}; {FIX}"
        )


def _check_sequences(index: _Index, bin_bytes: int) -> None:
    """Check that each sequence begins where the previous one ends, and that the last one ends with the ``.bin``."""
    end = seen = 0
    for seen, count in _chunks(index.sequences):
        lengths, pointers = index.lengths(seen, count), index.pointers(seen, count)
        ends = end + np.cumsum(lengths * index.dtype.itemsize)
        starts = ends - lengths * index.dtype.itemsize
        wrong = np.flatnonzero((lengths < 0) | (pointers != starts))
        if wrong.size:
            i = int(wrong[0])
            raise DataError(
                f"{index.name} is damaged: sequence {seen + i} of {lengths[i]} tokens begins at byte "
                f"{pointers[i]}, but the sequences before it end at byte {starts[i]}; {FIX}"
            )
        end, seen = int(ends[-1]), seen + count
        if end > bin_bytes:
            break
    if end != bin_bytes:
        raise DataError(
            f"{index.name} and .bin do not match: the first {seen} of {index.sequences} sequences take {end} bytes "
            f"({index.dtype.name}), the .bin has {bin_bytes}; {FIX}"
        )
    if not end:
        raise DataError(f"{index.name} describes {index.sequences} sequences without a token; name a pair with tokens")


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    """Return (first, number) of each chunk of at most CHUNK entries."""
    return ((first, min(CHUNK, count - first)) for first in range(0, count, CHUNK))
