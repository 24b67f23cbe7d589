"""Test the data source: its data depend only on (seed, step, index), and not on the layout."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch.contract.errors import DataError
from launch.contract.spec import Data, Parallelism, RunSpec, Training
from launch.train.data_loader import TokenSource, batch, check_documents, open_source

TEXT = open_source(Data(), 256, seed=1)
SYNTHETIC = open_source(Data(kind="synthetic"), 1000, seed=1)
STEPS = INDICES = st.integers(0, 2**40)


def write_indexed(folder: Path, tokens: Sequence[int] | npt.NDArray[np.int64]) -> str:
    """Write one document of one sequence in the format of Megatron-Core's IndexedDataset."""
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 1, 2)
    (folder / "corpus.idx").write_bytes(header + struct.pack("<iqqq", len(tokens), 0, 0, 1))
    (folder / "corpus.bin").write_bytes(np.array(tokens, "<i4").tobytes())
    return str(folder / "corpus")


@pytest.fixture(scope="module", params=["text", "tokens", "indexed", "synthetic"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenSource:
    folder = tmp_path_factory.mktemp("data")
    if request.param == "tokens":
        return open_source(Data(eod_token=999), 1000, seed=1)
    if request.param == "indexed":
        # There are so many tokens that two random places hardly ever begin at the same one.
        tokens = np.random.default_rng(1).integers(0, 1000, 2**22)
        return open_source(Data(kind="indexed", path=write_indexed(folder, tokens)), 1000, seed=1)
    return TEXT if request.param == "text" else SYNTHETIC


def spec_of(dp: int, micro_batch: int, micro_batches: int) -> RunSpec:
    training = Training(
        sequence_length=7, micro_batch_size=micro_batch, global_batch_size=dp * micro_batch * micro_batches
    )
    return RunSpec(parallelism=Parallelism(dp=dp), training=training)


@given(step=STEPS, index=INDICES, other=INDICES)
def test_sequence_is_a_function_of_its_place(source: TokenSource, step: int, index: int, other: int) -> None:
    first = source.sequence(step, index, 64)
    source.sequence(step, other, 64)
    assert torch.equal(first, source.sequence(step, index, 64))
    assert (first.dtype, first.shape) == (torch.int64, (64,))


@given(places=st.lists(st.tuples(STEPS, INDICES), min_size=2, max_size=2, unique=True))
def test_places_have_sequences_of_their_own(source: TokenSource, places: list[tuple[int, int]]) -> None:
    first, second = (source.sequence(*place, 512) for place in places)
    assert not torch.equal(first, second)


@given(dp=st.integers(1, 4), size=st.integers(1, 4), count=st.integers(1, 4), step=STEPS)
def test_every_layout_sees_the_same_global_batch(
    source: TokenSource, dp: int, size: int, count: int, step: int
) -> None:
    spec = spec_of(dp, size, count)
    ranks = [batch(source, spec, step, rank) for rank in range(dp)]
    assert {rank.shape for rank in ranks} == {(count, size, 8)}
    # The global batch is ordered by micro-batch, then by rank.
    together = torch.stack(ranks, dim=1).flatten(0, 2)
    alone = batch(source, spec_of(1, 1, dp * size * count), step, 0).flatten(0, 1)
    assert torch.equal(together, alone)


@given(length=st.integers(1, 300), step=STEPS)
def test_synthetic_tokens_stay_below_the_vocabulary(length: int, step: int) -> None:
    tokens = SYNTHETIC.sequence(step, 0, length)
    assert tokens.min() >= 0
    assert tokens.max() < 1000


def test_seed_and_content_are_told_apart_by_their_digest(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text that is long enough for a few tokens")
    before = open_source(Data(path=str(tmp_path)), 256, 1)
    (tmp_path / "b.py").write_text("more = 1")
    (tmp_path / "c.bin").write_text("not text")
    after = open_source(Data(path=str(tmp_path)), 256, 1)
    assert before.digest != after.digest
    assert not torch.equal(SYNTHETIC.sequence(0, 0, 8), open_source(Data(kind="synthetic"), 1000, 2).sequence(0, 0, 8))


def test_text_is_stretches_of_the_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "2.txt").write_text("second")
    (tmp_path / "1.py").write_text("first ")
    source = open_source(Data(path=str(tmp_path)), 256, 1)
    assert bytes(source.sequence(0, 0, 12)) == b"first second"
    stretches = {bytes(source.sequence(step, 0, 4)) for step in range(200)}
    assert stretches == {b"first second"[start : start + 4] for start in range(9)}


def test_one_file_is_a_source_too(tmp_path: Path) -> None:
    path = tmp_path / "corpus"
    path.write_bytes(bytes(range(256)))
    assert bytes(open_source(Data(path=str(path)), 256, 1).sequence(0, 0, 256)) == bytes(range(256))


def test_standard_library_is_a_text_of_its_own() -> None:
    text = bytes(TEXT.sequence(3, 5, 4096))
    assert b"    " in text  # Python code is indented.
    assert len({bytes(TEXT.sequence(step, 0, 64)) for step in range(20)}) == 20


def test_indexed_is_stretches_of_the_pair(tmp_path: Path) -> None:
    path = write_indexed(tmp_path, list(range(1000, 1009)))
    source = open_source(Data(kind="indexed", path=path, eod_token=1008, packed_sequences=True), 1009, 1)
    stretches = {tuple(source.sequence(step, 0, 4).tolist()) for step in range(200)}
    assert stretches == {tuple(range(start, start + 4)) for start in range(1000, 1006)}


def test_a_packed_sequence_with_more_documents_than_are_padded_to_is_told_before_the_first_step(tmp_path: Path) -> None:
    """The last token is only a label, so an end just before it begins no further document."""
    path = write_indexed(tmp_path, [9, 1, 9, 0, 2, 0, 3, 0, 4])
    data = Data(kind="indexed", path=path, eod_token=0, packed_sequences=True, max_documents=3)
    training = Training(steps=50, sequence_length=6, micro_batch_size=1, global_batch_size=1)
    spec = RunSpec(data=data, training=training)
    source = open_source(data, 10, 1)
    starts = [batch(source, spec, step, 0)[0, 0, :2].tolist() for step in range(50)]
    assert set(map(tuple, starts)) == {(9, 1), (1, 9), (9, 0)}
    check_documents(source, spec, 0)
    fewer = dataclasses.replace(spec, data=dataclasses.replace(data, max_documents=2))
    first = starts.index([9, 0])
    with pytest.raises(
        DataError, match=rf"step {first} holds 3 documents, .* than data\.max_documents=2; set .* to 3 or"
    ):
        check_documents(source, fewer, 0)
    check_documents(source, dataclasses.replace(spec, data=dataclasses.replace(data, max_documents=None)), 0)


@pytest.mark.parametrize("wrong", [-1, 9, 2**31 - 1])
def test_a_token_beyond_the_vocabulary_is_told_where_it_stands(wrong: int, tmp_path: Path) -> None:
    data = Data(kind="indexed", path=write_indexed(tmp_path, [8, 0, wrong, wrong]))
    source = open_source(data, 9, 1)
    with pytest.raises(DataError, match=rf"holds token {wrong} at position 2, .* model\.vocab_size=9; set"):
        source.sequence(0, 0, 4)
    assert open_source(Data(kind="indexed", path=write_indexed(tmp_path, [8] * 4)), 9, 1).sequence(0, 0, 4).max() == 8


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(kind="synthetic", path="x"), r"data\.kind=synthetic, data\.path=x, but .*Leave the field out"),
        (Data(kind="synthetic", tokenizer="x"), r"data\.kind=synthetic, data\.tokenizer=x, but"),
        (Data(kind="indexed", path="x", tokenizer="y"), r"data\.kind=indexed, data\.tokenizer=y, but"),
        (Data(kind="indexed"), r"data\.kind=indexed, data\.path=null, but .*Set data\.path"),
        (Data(path=""), r"data\.path='', but a path must name a file"),
        (Data(tokenizer=""), r"data\.tokenizer='', but a path must name a file"),
        (Data(path="a\0b"), r"data\.path='a\\x00b', but"),
        (Data("indexed", path="a\0b"), r"data\.path='a\\x00b', but"),
        (Data(tokenizer="a\0b"), r"data\.tokenizer='a\\x00b', but"),
        (Data(eod_token=-1), r"data\.eod_token=-1, model\.vocab_size=300, but .*Set eod_token"),
        (Data(eod_token=300), r"data\.eod_token=300, model\.vocab_size=300"),
        (Data(kind="indexed", path="x", eod_token=300), r"data\.eod_token=300"),
        (
            Data(kind="synthetic", packed_sequences=True),
            r"packed_sequences=true, data.eod_token=null, but .*Set data\.eod_token",
        ),
    ],
)
def test_fields_that_do_not_fit_are_told_before_a_file_is_opened(data: Data, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(data, 300, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: open_source(Data(path=str(folder / "gone")), 256, 1), "gone.* is neither a file nor a folder"),
        (lambda folder: open_source(Data(path=str(folder)), 256, 1), r"holds no \*\.py or \*\.txt file"),
        (lambda folder: open_source(Data(path=str(folder / "empty")), 256, 1), "is empty"),
        (lambda folder: open_source(Data(), 255, 1), r"data\.kind=text, .*model\.vocab_size=255"),
        (
            lambda folder: open_source(Data(path=str(folder / "few")), 256, 1).sequence(0, 0, 4),
            "holds 3 tokens.* the 4 of",
        ),
    ],
    ids=["missing", "no text in the folder", "empty", "small vocabulary", "too short"],
)
def test_errors_name_what_is_wrong_and_the_way_out(make, message: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "empty").touch()
    (tmp_path / "few").write_text("abc")
    with pytest.raises(DataError, match=message):
        make(tmp_path)
