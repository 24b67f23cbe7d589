"""Test Megatron-Core's indexed files: they are read as its own reader does, and damaged files are rejected with one
message."""

from __future__ import annotations

import os
import re
import struct
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch.contract.errors import DataError
from launch.data.indexed_dataset import open_pair

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
INTEGERS = [name for name in CODES if "float" not in name]
MIB = 1 << 20
DTYPE_AT = 17
"""The position of the type in the header. Another type of the same size gives another valid pair."""

Sequences = Sequence[Sequence[int]]


def index_of(
    lengths: npt.ArrayLike, dtype: str, borders: Sequence[int] | None = None, modes: bytes = b"", version: int = 1
) -> bytes:
    sizes = np.array(lengths, "<i8")
    pointers = (np.cumsum(sizes) - sizes) * np.dtype(dtype).itemsize
    last = np.array([0, len(sizes)] if borders is None else borders, "<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, CODES[dtype], len(sizes), len(last))
    return header + sizes.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + last.tobytes() + modes


def write_pair(folder: Path, sequences: Sequences, dtype: str = "int32", **index: Any) -> str:
    (folder / "corpus.bin").write_bytes(b"".join(np.array(one, dtype).tobytes() for one in sequences))
    (folder / "corpus.idx").write_bytes(index_of([len(one) for one in sequences], dtype, **index))
    return str(folder / "corpus")


@given(
    sequences=st.lists(st.lists(st.integers(0, 127), max_size=9), min_size=1, max_size=9).filter(any),
    dtype=st.sampled_from(INTEGERS),
)
def test_stream_is_all_sequences_in_order(sequences: Sequences, dtype: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pair = open_pair(write_pair(Path(folder), sequences, dtype))
        assert pair.tokens.dtype == np.dtype(dtype)
        assert pair.tokens.tolist() == [token for one in sequences for token in one]


def test_every_truncation_of_either_file_is_refused(tmp_path: Path) -> None:
    path = write_pair(tmp_path, [[1, 2, 3], [], [4]], borders=[0, 1, 3])
    for file in (tmp_path / "corpus.idx", tmp_path / "corpus.bin"):
        content = file.read_bytes()
        for size in range(len(content)):
            file.write_bytes(content[:size])
            with pytest.raises(DataError, match=rf"{size if size else 'has 0'}\b.*; (copy|name) the pair"):
                open_pair(path)
        file.write_bytes(content)
    assert open_pair(path).tokens.tolist() == [1, 2, 3, 4]


@given(place=st.integers(0, 101), value=st.integers(0, 255))
def test_a_changed_byte_of_the_index_is_refused_or_changes_nothing(place: int, value: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_pair(Path(folder), [[1, 2, 3], [], [4]], borders=[0, 1, 3])
        index = bytearray(Path(f"{path}.idx").read_bytes())
        assert len(index) == 34 + 3 * 12 + 3 * 8
        place %= len(index)
        index[place] = value
        Path(f"{path}.idx").write_bytes(index)
        try:
            tokens = open_pair(path).tokens
        except DataError:
            return
        assert place == DTYPE_AT or tokens.tolist() == [1, 2, 3, 4]


@given(index=st.binary(max_size=200), behind_header=st.booleans())
def test_no_index_raises_anything_else(index: bytes, behind_header: bool) -> None:
    header = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 4) if behind_header else b""
    with tempfile.TemporaryDirectory() as folder:
        path = write_pair(Path(folder), [[1]])
        Path(f"{path}.idx").write_bytes(header + index)
        with pytest.raises(DataError):
            open_pair(path)


HUGE = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 5, 2**64 - 1, 2**64 - 1)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", r"is truncated: its header takes 34 bytes, but the file has 0"),
        (b"TNTIDX\x00\x00" + bytes(40), r"begins with b'TNTIDX\\x00\\x00\\x00', not with b'MMIDIDX"),
        (index_of([3], "int32", version=2), r"has version 2, but only 1 is known"),
        (b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 9, 0, 0), r"unknown type 9; 1 to 8 are known"),
        (index_of([3], "float32"), r"numbers of type float32, but tokens are integers"),
        (index_of([3], "float64"), r"numbers of type float64, but tokens are integers"),
        (HUGE, r"truncated: 18446744073709551615 sequences .* take 368934881474191032334 bytes, but the file has 34"),
        (index_of([3], "int32")[:-1], r"truncated: 1 sequences and 2 document borders take 62 bytes, but the file has 61"),
        (index_of([3], "int32") + b"12", r"too long: 1 sequences and 2 document borders take 62 bytes, but the file has 64"),
        (index_of([3], "int32", modes=b"\x00"), r"multimodal pair.*a mode for each of 1 sequences"),
        (index_of([2], "int32"), r"the first 1 of 1 sequences take 8 bytes \(int32\), the \.bin has 12"),
        (index_of([2, 2], "int32"), r"the first 2 of 2 sequences take 16 bytes \(int32\), the \.bin has 12"),
        (index_of([4, -1], "int32"), r"sequence 1 of -1 tokens begins at byte 16"),
        (
            index_of([1, 2], "int32").replace(struct.pack("<q", 4), struct.pack("<q", 8)),
            r"sequence 1 of 2 tokens begins at byte 8, but the sequences before it end at byte 4",
        ),
    ],
    ids=[
        "empty", "magic", "version", "type", "float32", "float64", "counts", "truncated", "too long", "modes", "long bin",
        "short bin", "negative length", "pointer",
    ],
)  # fmt: skip
def test_damage_is_told_with_its_numbers_and_the_way_out(index: bytes, message: str, tmp_path: Path) -> None:
    path = write_pair(tmp_path, [[1, 2, 3]])
    Path(f"{path}.idx").write_bytes(index)
    with pytest.raises(DataError, match=rf"data\.path='.*corpus': its \.idx .*{message}.*; (copy|name) "):
        open_pair(path)


@pytest.mark.parametrize("sequences", [[], [[], []]])
def test_a_pair_without_tokens_is_refused(sequences: Sequences, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"describes {len(sequences)} sequences without a token"):
        open_pair(write_pair(tmp_path, sequences))


def test_a_long_index_is_checked_to_its_end(tmp_path: Path) -> None:
    count = 2**20 + 7
    (tmp_path / "corpus.bin").write_bytes(bytes(range(256)) * (count // 256) + bytes(count % 256))
    index = index_of(np.ones(count), "uint8", borders=range(count + 1))
    (tmp_path / "corpus.idx").write_bytes(index)
    assert len(open_pair(str(tmp_path / "corpus")).tokens) == count
    place = index.rindex(struct.pack("<q", count - 2), 0, 34 + 12 * count)
    (tmp_path / "corpus.idx").write_bytes(index[:place] + struct.pack("<q", 5) + index[place + 8 :])
    with pytest.raises(DataError, match=rf"sequence {count - 2} of 1 tokens .* byte 5, .* end at byte {count - 2};"):
        open_pair(str(tmp_path / "corpus"))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_files_that_are_not_there_or_not_files(suffix: str, tmp_path: Path) -> None:
    path = write_pair(tmp_path, [[1, 2, 3]])
    with pytest.raises(DataError, match=rf"names one file of a pair.*data\.path='{re.escape(path)}'$"):
        open_pair(path + suffix)
    Path(path + suffix).unlink()
    with pytest.raises(DataError, match=rf"corpus\{suffix}, which is missing; name the pair without"):
        open_pair(path)
    Path(path + suffix).mkdir()
    with pytest.raises(DataError, match=rf"corpus\{suffix}, which is not a file"):
        open_pair(path)
    Path(path + suffix).rmdir()
    os.mkfifo(path + suffix)
    with pytest.raises(DataError, match=rf"corpus\{suffix}, which is not a file"):
        open_pair(path)


def test_errors_of_the_system_are_told_with_path_and_reason(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path='x+' cannot be read: File name too long: x+\.bin; correct"):
        open_pair("x" * 300)
    path = write_pair(tmp_path, [[1, 2, 3]])
    Path(f"{path}.idx").unlink()
    Path(f"{path}.idx").symlink_to("/proc/self/mem")  # Even the first byte of this file cannot be read.
    with pytest.raises(DataError, match=r"corpus' cannot be read: Input/output error: .*corpus; correct"):
        open_pair(path)


def read_bytes_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def resident_file_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssFile:\s+(\d+) kB", status)[1])  # type: ignore[index]


def test_a_large_pair_is_mapped_and_its_digest_reads_64_blocks(tmp_path: Path) -> None:
    size, path = 8 << 30, str(tmp_path / "corpus")
    Path(f"{path}.idx").write_bytes(index_of([2**30] * 4, "uint16"))
    Path(f"{path}.bin").touch()
    os.truncate(f"{path}.bin", size)
    read, resident = read_bytes_so_far(), resident_file_bytes()
    pair = open_pair(path)
    assert pair.tokens.shape == (size // 2,)
    assert pair.tokens[size // 2 - 1] == 0
    assert read_bytes_so_far() - read < MIB
    assert resident_file_bytes() - resident < 8 * MIB
    before = pair.digest
    assert 64 * MIB <= read_bytes_so_far() - read < 65 * MIB
    for place in (0, MIB - 1, size - MIB, size - 1):
        with open(f"{path}.bin", "r+b") as file:
            file.seek(place)
            file.write(b"\x01")
        after = open_pair(path).digest
        assert after != before
        before = after


def test_digest_of_a_small_pair_is_of_every_byte(tmp_path: Path) -> None:
    path = write_pair(tmp_path, [[1, 2, 3], [4]], "uint8")
    digests = {open_pair(path).digest, open_pair(path).digest}
    for place in range(4):
        Path(f"{path}.bin").write_bytes(bytes(9 if i == place else i + 1 for i in range(4)))
        digests.add(open_pair(path).digest)
    digests.add(open_pair(write_pair(tmp_path, [[1, 2], [3, 4]], "uint8")).digest)
    assert len(digests) == 6


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    """Importing megatron-core without Transformer Engine warns about missing features, and about parts of
    megatron-core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


@pytest.mark.parametrize("dtype", INTEGERS)
def test_reads_what_megatron_core_writes_as_its_own_reader_does(
    dtype: str, megatron: ModuleType, tmp_path: Path
) -> None:
    path = str(tmp_path / "corpus")
    generator = np.random.default_rng(1)
    limits = np.iinfo(dtype)
    builder = megatron.IndexedDatasetBuilder(f"{path}.bin", dtype=getattr(np, dtype))
    for lengths in ([3], [5, 0, 2], [1] * 4, [40]):
        tokens = generator.integers(limits.min, limits.max, sum(lengths), dtype=dtype, endpoint=True)
        builder.add_document(tokens, lengths)
    builder.add_item(torch.tensor([7, 8, 9]))
    builder.end_document()
    builder.finalize(f"{path}.idx")
    theirs = megatron.IndexedDataset(path)
    ours = open_pair(path).tokens
    assert ours.tolist() == np.concatenate(theirs[:]).tolist()
    end = 0
    for i, length in enumerate(theirs.sequence_lengths):
        begin, end = end, end + int(length)
        for first in range(begin, end):
            for last in range(first + 1, end + 1):
                assert np.array_equal(ours[first:last], theirs.get(i, offset=first - begin, length=last - first))


def test_refuses_what_megatron_core_writes_for_images(megatron: ModuleType, tmp_path: Path) -> None:
    path = str(tmp_path / "corpus")
    builder = megatron.IndexedDatasetBuilder(f"{path}.bin", multimodal=True)
    builder.add_item(torch.tensor([7, 8, 9]), mode=1)
    builder.end_document()
    builder.finalize(f"{path}.idx")
    with pytest.raises(DataError, match="multimodal pair"):
        open_pair(path)
