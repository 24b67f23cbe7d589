"""Test text as a stream of tokens: documents are complete, in order and terminated, and unreadable text is reported."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers

from launch.contract.errors import DataError
from launch.contract.spec import Data
from launch.data import text_files
from launch.data.text_files import read_text
from launch.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[4]
WORDS = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "[EOD]": 7}


def word_tokenizer() -> Tokenizer:
    """Split words at spaces. The five token numbers have a gap, and the largest is 7."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Encode any text by byte-level BPE, as GPT-2, Llama 3 and Qwen do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)  # type: ignore[call-arg]
    tokenizer.train_from_iterator(["the cat sat on the mat with the other cats"] * 9, trainer)
    return tokenizer


BYTES = byte_tokenizer()


def corpus(folder: Path, *documents: str, tokenizer: Tokenizer | None = None) -> Data:
    for number, document in enumerate(documents):
        (folder / f"{number:03}.txt").write_bytes(document.encode())
    if tokenizer is None:
        return Data(path=str(folder))
    tokenizer.save(str(folder / "tokenizer.json"))
    return Data(path=str(folder), tokenizer=str(folder / "tokenizer.json"))


@given(
    documents=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5),
    eod=st.sampled_from([None, 0, 299]),
)
def test_stream_is_each_document_and_its_end(documents: list[str], eod: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = replace(corpus(Path(folder), *documents, tokenizer=BYTES), eod_token=eod)
        text = read_text(data, 300)
    end = [] if eod is None else [eod]
    expected = [BYTES.encode(document, add_special_tokens=False).ids + end for document in documents]
    assert text.tokens.dtype == np.int32
    assert text.tokens.tolist() == [token for document in expected for token in document]


@given(documents=st.lists(st.binary(), min_size=1, max_size=5).filter(any), eod=st.sampled_from([None, 10, 256, 999]))
def test_bytes_are_tokens_without_a_tokenizer(documents: list[bytes], eod: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, document in enumerate(documents):
            (Path(folder) / f"{number}.txt").write_bytes(document)
        text = read_text(Data(path=folder, eod_token=eod), 1000)
    end = [] if eod is None else [eod]
    assert text.tokens.tolist() == [token for document in documents if document for token in [*document, *end]]
    assert text.tokens.dtype == (np.int32 if (eod or 0) > 255 else np.uint8)


def test_many_files_are_encoded_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The text fills more than one batch, so it crosses the borders of batches.
    monkeypatch.setattr(text_files, "ENCODED_TOGETHER", 1 << 14)
    lines = [f"{word} " * (1 << 9) for word in ("the", "cat", "sat", "dog", "cat")] * 4
    text = read_text(corpus(tmp_path, *lines, tokenizer=word_tokenizer()), 8)
    assert text.tokens[:: 1 << 9].tolist() == [1, 2, 3, 0, 2] * 4
    assert len(text.tokens) == 20 << 9


def test_a_tokenizer_cuts_pads_and_adds_nothing(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9, pad_id=0)
    tokenizer.post_processor = processors.TemplateProcessing(single="[EOD] $A [EOD]", special_tokens=[("[EOD]", 7)])  # type: ignore[no-untyped-call]
    text = read_text(corpus(tmp_path, "the cat sat", "the", tokenizer=tokenizer), 8)
    assert text.tokens.tolist() == [1, 2, 3, 1]


def test_digest_is_of_content_tokenizer_and_end_of_document(tmp_path: Path) -> None:
    data = corpus(tmp_path, "the cat", "sat", tokenizer=word_tokenizer())
    variants = [data, replace(data, eod_token=0), replace(data, eod_token=7), replace(data, tokenizer=None)]
    digests = [read_text(variant, 300).digest for variant in variants]
    BYTES.save(str(tmp_path / "tokenizer.json"))
    digests.append(read_text(data, 300).digest)
    (tmp_path / "001.txt").write_text("sat.")
    digests.append(read_text(data, 300).digest)
    assert len(set(digests)) == len(digests)
    assert read_text(data, 300).digest == digests[-1]


def test_text_that_is_not_utf8_is_told_by_file_and_byte(tmp_path: Path) -> None:
    data = corpus(tmp_path, "the cat", tokenizer=word_tokenizer())
    (tmp_path / "001.txt").write_bytes(b"the c\xe4t")
    with pytest.raises(DataError, match=r"001\.txt is not UTF-8: byte 5 is 0xe4 .*remove data\.tokenizer"):
        read_text(data, 8)
    assert len(read_text(replace(data, tokenizer=None), 256).tokens) == 14


def test_vocabulary_must_hold_the_largest_token(tmp_path: Path) -> None:
    path = str(tmp_path / "tokenizer.json")
    tokenizer = word_tokenizer()
    tokenizer.save(path)
    load_tokenizer(path, 8)
    with pytest.raises(DataError, match=r"up to 7 \('\[EOD\]'\), beyond model\.vocab_size=7; set .*=8 or more"):
        load_tokenizer(path, 7)
    tokenizer.add_special_tokens([AddedToken("<|x|>")])
    tokenizer.save(path)
    largest = max(tokenizer.get_vocab().values())
    load_tokenizer(path, largest + 1)
    with pytest.raises(DataError, match=rf"beyond model\.vocab_size={largest};"):
        load_tokenizer(path, largest)


EMPTY = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}).encode()
PANICKING = json.dumps(
    json.loads(word_tokenizer().to_str()) | {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
).encode()
"""Rust panics on this tokenizer. The Python error that follows is no subclass of Exception."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is not a tokenizer\.json: .*; name the file"),
        (b"\xff\xfe\x00", r"is not a tokenizer\.json"),
        (b'{"model_type": "llama", "vocab_size": 32000}', r"is not a tokenizer\.json"),
        (word_tokenizer().to_str().encode()[:-20], r"is not a tokenizer\.json"),
        (PANICKING, r"is not a tokenizer\.json: .*precompiled_charsmap.*; name the file"),
        (EMPTY, r"has no token; name a trained tokenizer"),
    ],
    ids=["empty", "binary", "another JSON", "truncated", "panicking", "untrained"],
)
def test_what_is_no_tokenizer_is_told(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"data\.tokenizer='{path}' {message}"):
        load_tokenizer(str(path), 256)


def test_a_tokenizer_without_a_token_for_the_text_is_told(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"the": 0}, unk_token="[UNK]"))
    with pytest.raises(DataError, match=r"cannot encode the text: .*UNK.*; name a tokenizer that covers it"):
        read_text(corpus(tmp_path, "the cat", tokenizer=tokenizer), 8)


def test_text_of_which_a_tokenizer_makes_no_token_is_not_called_empty(tmp_path: Path) -> None:
    data = corpus(tmp_path, " \n", "   ", tokenizer=word_tokenizer())
    with pytest.raises(
        DataError, match=r"tokenizer\.json' makes no token from the 5 bytes of data\.path=.*; name a tok"
    ):
        read_text(data, 8)
    (tmp_path / "empty.txt").touch()
    for tokenizer in (None, data.tokenizer):
        with pytest.raises(DataError, match=r"empty\.txt' is empty; name a file with text"):
            read_text(Data(path=str(tmp_path / "empty.txt"), tokenizer=tokenizer), 8)


@pytest.mark.parametrize("path", ["a\0b", "a\ud800b"], ids=["NUL", "half a character"])
def test_what_no_path_can_be_is_told(path: str, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("the cat")
    for field, data in {"path": Data(path=path), "tokenizer": Data(path=str(text), tokenizer=path)}.items():
        with pytest.raises(DataError) as caught:
            read_text(data, 256)
        assert str(caught.value).startswith(f"data.{field}={path!r} ") and "correct the path" in str(caught.value)


def test_files_that_cannot_be_read_are_told_by_path_and_reason(tmp_path: Path) -> None:
    # Root has all permissions, but reading this fails for everyone: the first byte of /proc/self/mem is an I/O error.
    unreadable = "/proc/self/mem"
    for name, data in {"path": Data(path=unreadable), "tokenizer": Data(tokenizer=unreadable)}.items():
        with pytest.raises(
            DataError, match=rf"data\.{name}='{unreadable}' cannot be read: Input/output .*{unreadable};"
        ):
            read_text(data, 256)
    (tmp_path / "a.txt").symlink_to(unreadable)
    with pytest.raises(
        DataError, match=rf"'{tmp_path}' cannot be read: Input/output error: {tmp_path}/a\.txt; correct"
    ):
        read_text(Data(path=str(tmp_path)), 256)
    with pytest.raises(DataError, match=r"data\.path='x+' cannot be read: File name too long: x+; correct"):
        read_text(Data(path="x" * 300), 256)
    with pytest.raises(DataError, match=rf"data\.tokenizer='{tmp_path}' cannot be read: Is a directory"):
        load_tokenizer(str(tmp_path), 256)
    with pytest.raises(DataError, match=r"data\.tokenizer='gone\.json' cannot be read: No such file"):
        load_tokenizer("gone.json", 256)


def test_without_the_library_the_message_names_it() -> None:
    script = (
        "import sys; sys.modules['tokenizers'] = None\n"
        "from launch.contract.errors import EnvironmentFault\n"
        "from launch.data.text_files import read_text\n"
        "from launch.contract.spec import Data\n"
        "assert len(read_text(Data(), 256).tokens)\n"
        "try:\n    read_text(Data(tokenizer='t.json'), 256)\n"
        "except EnvironmentFault as fault:\n    print(fault)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "data.tokenizer='t.json' needs the package tokenizers" in done.stdout
    assert "pip install 'tokenizers>=0.21,<1'" in done.stdout
