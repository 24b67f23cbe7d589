"""Megatron-Core's IndexedDataset: a pair of files, tokens in ``.bin`` and where each sequence lies in ``.idx``.

The format is that of megatron.core.datasets.indexed_dataset (``_IndexWriter``, megatron-core 0.16), all of it little
endian: the magic, the version as uint64, the type of the tokens as uint8, counts of sequences and of document borders
as uint64; then the length of each sequence in tokens as int32, where it begins in the ``.bin`` in bytes as int64, and
the sequences at which documents begin and end as int64. A multimodal pair goes on with a mode for each sequence.

Sequences lie in the ``.bin`` one behind the other, so the whole of it is one stream of tokens.
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
"""Names of the types by their code in the header."""

LENGTH, POINTER, BORDER = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<i8")
CHUNK = 1 << 20
"""Entries of the index that are looked at together: an index of any size is checked in a few dozen MiB."""

WAY_OUT = "copy the pair again, or write it anew with Megatron's tools/preprocess_data.py"


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """A pair that has been found in order."""

    path: str
    """Of both files, without their suffix."""
    tokens: npt.NDArray[np.integer[Any]]
    """The stream, memory-mapped: shape (tokens,), in the type that the files hold."""

    @property
    def name(self) -> str:
        return f"data.path={self.path!r}"

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal digits, of the whole ``.idx``, and of the ``.bin`` as
        :func:`launch.common.file_digest.sampled_digest` takes it.

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
    """An open ``.idx`` and what its header says."""

    file: BinaryIO
    name: str
    """How messages begin."""
    dtype: np.dtype[Any]
    sequences: int
    borders: int

    @property
    def expected_bytes(self) -> int:
        return HEADER.size + self.sequences * (LENGTH.itemsize + POINTER.itemsize) + self.borders * BORDER.itemsize

    def lengths(self, first: int, count: int) -> npt.NDArray[np.int64]:
        return self._entries(LENGTH, HEADER.size, first, count)

    def pointers(self, first: int, count: int) -> npt.NDArray[np.int64]:
        return self._entries(POINTER, HEADER.size + self.sequences * LENGTH.itemsize, first, count)

    def document_borders(self, first: int, count: int) -> npt.NDArray[np.int64]:
        start = HEADER.size + self.sequences * (LENGTH.itemsize + POINTER.itemsize)
        return self._entries(BORDER, start, first, count)

    def _entries(self, dtype: np.dtype[Any], start: int, first: int, count: int) -> npt.NDArray[np.int64]:
        self.file.seek(start + first * dtype.itemsize)
        return np.frombuffer(self.file.read(count * dtype.itemsize), dtype).astype(np.int64)


def open_pair(path: str) -> IndexedDataset:
    """The pair ``path``.bin and ``path``.idx, checked against each other; of the ``.bin`` nothing is read.

    Raises:
        DataError: a file is missing or unreadable, the ``.idx`` is not of this format or contradicts itself, its
            tokens are not integers, or the ``.bin`` is not of the size it says.
    """
    name = f"data.path={path!r}"
    if path.endswith((".bin", ".idx")):
        raise DataError(f"{name} names one file of a pair; name both by what they share: data.path={path[:-4]!r}")
    try:
        bin_bytes = _size(name, Path(f"{path}.bin"))
        idx_bytes = _size(name, Path(f"{path}.idx"))
        with open(f"{path}.idx", "rb") as file:
            index = _read_header(file, f"{name}: its .idx", idx_bytes)
            _check_size(index, idx_bytes)
            _check_sequences(index, bin_bytes)
            _check_documents(index)
        return IndexedDataset(path, np.memmap(f"{path}.bin", index.dtype, mode="r"))
    except OSError as error:
        raise unreadable(name, Path(path), error) from error


def _size(name: str, path: Path) -> int:
    if not path.exists():
        raise DataError(f"{name} needs {path}, which is missing; name the pair without .bin and .idx, and keep both")
    if not path.is_file():
        raise DataError(f"{name} needs {path}, which is not a file; name the pair without .bin and .idx")
    return path.stat().st_size


def _read_header(file: BinaryIO, name: str, idx_bytes: int) -> _Index:
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise DataError(f"{name} is truncated: its header takes {HEADER.size} bytes, it has {idx_bytes}; {WAY_OUT}")
    magic, version, code, sequences, borders = HEADER.unpack(header)
    if magic != MAGIC:
        raise DataError(f"{name} begins with {magic!r} and not with {MAGIC!r}: no index of Megatron-Core; {WAY_OUT}")
    if version != VERSION:
        raise DataError(f"{name} is of version {version}, and only {VERSION} is known; {WAY_OUT}")
    if code not in TYPES:
        raise DataError(f"{name} gives its tokens the unknown type {code}, and 1 to {len(TYPES)} are known; {WAY_OUT}")
    dtype = np.dtype(TYPES[code]).newbyteorder("<")
    if dtype.kind == "f":
        raise DataError(f"{name} holds numbers of type {TYPES[code]} and tokens are integers; name a pair of tokens")
    return _Index(file, name, dtype, sequences, borders)


def _check_size(index: _Index, idx_bytes: int) -> None:
    surplus = idx_bytes - index.expected_bytes
    if index.sequences and surplus == index.sequences:
        raise DataError(
            f"{index.name} is of a multimodal pair: behind its {index.expected_bytes} bytes stands a mode for each of "
            f"{index.sequences} sequences; name a pair of text alone"
        )
    if surplus:
        raise DataError(
            f"{index.name} is {'truncated' if surplus < 0 else 'too long'}: {index.sequences} sequences and "
            f"{index.borders} document borders take {index.expected_bytes} bytes, it has {idx_bytes}; {WAY_OUT}"
        )


def _check_sequences(index: _Index, bin_bytes: int) -> None:
    """Each sequence begins where the one before it ends, and the last one ends with the ``.bin``."""
    end = seen = 0
    for seen, count in _chunks(index.sequences):
        lengths, pointers = index.lengths(seen, count), index.pointers(seen, count)
        ends = end + np.cumsum(lengths * index.dtype.itemsize)
        starts = ends - lengths * index.dtype.itemsize
        wrong = np.flatnonzero((lengths < 0) | (pointers != starts))
        if wrong.size:
            i = int(wrong[0])
            raise DataError(
                f"{index.name} is damaged: sequence {seen + i} of {lengths[i]} tokens is said to begin at byte "
                f"{pointers[i]}, and those before it end at byte {starts[i]}; {WAY_OUT}"
            )
        end, seen = int(ends[-1]), seen + count
        if end > bin_bytes:
            break
    if end != bin_bytes:
        raise DataError(
            f"{index.name} and .bin do not fit: the first {seen} of {index.sequences} sequences take {end} bytes "
            f"({index.dtype.name}), the .bin has {bin_bytes}; {WAY_OUT}"
        )
    if not end:
        raise DataError(
            f"{index.name} describes {index.sequences} sequences and not one token; name a pair with tokens"
        )


def _check_documents(index: _Index) -> None:
    """Borders rise to the number of sequences, as Megatron-Core's own reader asserts."""
    last = 0
    for first, count in _chunks(index.borders):
        borders = np.concatenate(([last], index.document_borders(first, count)))
        wrong = np.flatnonzero(borders[1:] < borders[:-1])
        if wrong.size:
            i = int(wrong[0])
            raise DataError(
                f"{index.name} is damaged: document border {first + i} is sequence {borders[i + 1]}, behind sequence "
                f"{borders[i]} of the one before; {WAY_OUT}"
            )
        last = int(borders[-1])
    if last != index.sequences:
        raise DataError(
            f"{index.name} is damaged: its last document ends with sequence {last} of {index.sequences}; {WAY_OUT}"
        )


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    """(first, number) of each run of at most CHUNK entries among ``count``."""
    return ((first, min(CHUNK, count - first)) for first in range(0, count, CHUNK))
