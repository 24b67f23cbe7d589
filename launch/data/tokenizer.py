"""A local tokenizer.json, read with the Hugging Face tokenizers library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.contract.errors import DataError, EnvironmentFault
from launch.data.fields import read_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class LocalTokenizer:
    """A tokenizer whose tokens are all in the model's vocabulary."""

    name: str
    digest: str
    """SHA-256 of the file, in hexadecimal digits."""
    tokenizer: Tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without truncation and without special tokens around it.

        Raises:
            DataError: the tokenizer has no token for a part of a text.
        """
        with _library_errors(
            f"{self.name} cannot encode the text", "name a tokenizer that covers it, or remove data.tokenizer"
        ):
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def load_tokenizer(path: str, vocab_size: int) -> LocalTokenizer:
    """Load the tokenizer in ``path``, with truncation and padding switched off.

    Raises:
        DataError: the file cannot be read, is not a tokenizer.json, or has a token beyond ``vocab_size``.
        EnvironmentFault: the tokenizers library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise EnvironmentFault(
            f"data.tokenizer={path!r} needs the package tokenizers, which cannot be imported ({error}); "
            f"pip install 'tokenizers>=0.21,<1', or remove data.tokenizer"
        ) from error
    name = f"data.tokenizer={path!r}"
    content = read_bytes(name, Path(path))
    with _library_errors(f"{name} is not a tokenizer.json", "name the file that tokenizers' Tokenizer.save writes"):
        tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _check_vocabulary(name, tokenizer, vocab_size)
    return LocalTokenizer(name, hashlib.sha256(content).hexdigest(), tokenizer)


@contextmanager
def _library_errors(found: str, remedy: str) -> Iterator[None]:
    """Convert the library's errors to a DataError.

    The library has no error type of its own. It raises ValueError, Exception itself, and BaseException if its Rust code panics.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise DataError(f"{found}: {error}; {remedy}") from error


def _check_vocabulary(name: str, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check the largest token instead of the number of tokens, which is smaller if the vocabulary has gaps."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{name} has no token; name a trained tokenizer")
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= vocab_size:
        raise DataError(
            f"{name} has tokens up to {largest} ({token!r}), beyond model.vocab_size={vocab_size}; "
            f"set model.vocab_size={largest + 1} or more, or name the model's own tokenizer"
        )
