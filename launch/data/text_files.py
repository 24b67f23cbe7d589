"""Text files as one stream of tokens, which are bytes or a tokenizer's tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from launch.contract.errors import DataError
from launch.contract.spec import BYTE_VALUES, Data
from launch.data.fields import read_bytes, source_of, text_files
from launch.data.tokenizer import LocalTokenizer, load_tokenizer

ENCODED_TOGETHER = 1 << 24
"""The bytes of text per batch. The library encodes the files of a batch in parallel, and meanwhile needs some hundred bytes per
token."""


@dataclass(frozen=True, eq=False)
class Text:
    """A text in memory."""

    name: str
    tokens: npt.NDArray[np.integer[Any]]
    """The stream: shape (tokens,), uint8 or int32."""
    digest: str
    """SHA-256, in hexadecimal digits, of each file, the tokenizer's file and the end-of-document token."""


def read_text(data: Data, vocab_size: int) -> Text:
    """Read the text that ``data`` describes, file by file in the order of their names.

    Each file is a document, and ``data.eod_token`` follows it. A file without a token adds nothing.

    Raises:
        DataError: a file cannot be read or is not UTF-8, the files contain no token, or the tokenizer does not fit
            ``vocab_size``.
        EnvironmentFault: the tokenizers library is needed but not installed.
    """
    name = source_of(data)
    tokenizer = load_tokenizer(data.tokenizer, vocab_size) if data.tokenizer is not None else None
    as_bytes = tokenizer is None and (data.eod_token or 0) < BYTE_VALUES
    dtype = np.dtype(np.uint8 if as_bytes else np.int32)
    content = hashlib.sha256(f"{tokenizer.digest if tokenizer else 'bytes'} {data.eod_token}".encode())
    end = b"" if data.eod_token is None else np.array(data.eod_token, dtype).tobytes()
    stream, read = bytearray(), 0
    for files in _batches(name, text_files(data), content):
        read += sum(map(len, files.values()))
        for document in _encode(files, tokenizer):
            if len(document):
                stream += np.asarray(document, dtype).tobytes() + end
    if not stream:
        raise _without_tokens(name, read, tokenizer)
    return Text(name, np.frombuffer(stream, dtype), content.hexdigest())


def _without_tokens(name: str, read: int, tokenizer: LocalTokenizer | None) -> DataError:
    if tokenizer is None or not read:
        return DataError(f"{name} is empty; name a file with text, or remove data.path")
    return DataError(
        f"{tokenizer.name} makes no token from the {read} bytes of {name}; "
        f"name a tokenizer that covers the text, or remove data.tokenizer"
    )


def _batches(name: str, files: Sequence[Path], digest: hashlib._Hash) -> Iterator[dict[Path, bytes]]:
    """Yield the content of all files in batches of about ENCODED_TOGETHER bytes, and update ``digest`` with each file."""
    batch: dict[Path, bytes] = {}
    held = 0
    for file in files:
        batch[file] = read_bytes(name, file)
        digest.update(hashlib.sha256(batch[file]).digest())
        held += len(batch[file])
        if held >= ENCODED_TOGETHER:
            yield batch
            batch, held = {}, 0
    yield batch


def _encode(
    files: dict[Path, bytes], tokenizer: LocalTokenizer | None
) -> list[npt.NDArray[np.uint8]] | list[list[int]]:
    if tokenizer is None:
        return [np.frombuffer(content, np.uint8) for content in files.values()]
    return tokenizer.encode([_decode(path, content) for path, content in files.items()])


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x} ({error.reason}); "
            f"convert the file, or remove data.tokenizer to read bytes"
        ) from error
