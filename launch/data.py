"""Where tokens come from: a sequence is a pure function of (seed, step, its index in the global batch).

So every layout and both twins of a pair see the same tokens, and any sequence can be had without those before it.
Randomness is counter-based: Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) with the
seed as its key and (step, index) as its counter.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from launch.errors import DataError
from launch.spec import Data, RunSpec

BYTE_VALUES = 256
TEXT_SUFFIXES = (".py", ".txt")


class TokenSource(Protocol):
    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal digits."""

    def sequence(self, step: int, index: int, length: int) -> torch.Tensor:
        """Tokens of sequence ``index`` of the global batch of ``step``: int64 of shape (length,).

        Raises:
            DataError: the source is shorter than ``length``.
        """


@dataclass(frozen=True)
class TextSource:
    """Bytes of a text as tokens: each sequence is a stretch of it that begins anywhere."""

    name: str
    content: torch.Tensor
    """uint8 of shape (bytes,)."""
    digest: str
    seed: int

    def sequence(self, step: int, index: int, length: int) -> torch.Tensor:
        places = len(self.content) - length + 1
        if places < 1:
            raise DataError(
                f"{self.name} holds {len(self.content)} bytes, fewer than the {length} of one sequence; "
                f"use a longer text, or lower training.sequence_length"
            )
        start = int(_random(self.seed, step, index, 1)[0] % np.uint64(places))
        return self.content[start : start + length].long()


@dataclass(frozen=True)
class SyntheticSource:
    """Uniformly random tokens below ``vocab_size``: for speed alone, there is nothing in them to learn."""

    vocab_size: int
    seed: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"synthetic {self.vocab_size} {self.seed}".encode()).hexdigest()

    def sequence(self, step: int, index: int, length: int) -> torch.Tensor:
        tokens = _random(self.seed, step, index, length) % np.uint64(self.vocab_size)
        return torch.from_numpy(tokens.astype(np.int64))


def open_source(data: Data, vocab_size: int, seed: int) -> TokenSource:
    """The source that ``data`` describes.

    Raises:
        DataError: the path is not there, is empty or cannot be read, or ``vocab_size`` cannot hold a byte.
    """
    if data.kind == "synthetic":
        return SyntheticSource(vocab_size, seed)
    if vocab_size < BYTE_VALUES:
        raise DataError(
            f"data.kind='text' makes a token of each byte and needs {BYTE_VALUES} of them, but "
            f"model.vocab_size={vocab_size}; set model.vocab_size={BYTE_VALUES} or more, or data.kind=synthetic"
        )
    name = f"data.path={data.path!r}" if data.path else "the source of Python's standard library"
    content = b"".join(_read(name, path) for path in _text_files(name, data.path))
    if not content:
        raise DataError(f"{name} is empty; name a file with text in it, or leave data.path out")
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return TextSource(name, tokens, hashlib.sha256(content).hexdigest(), seed)


def batch(source: TokenSource, spec: RunSpec, step: int, dp_rank: int) -> torch.Tensor:
    """One rank's tokens of one step: int64 of shape (micro-batches, micro-batch size, sequence length + 1).

    Micro-batch m of data-parallel rank r holds the sequences from (m * dp + r) * micro-batch size on, so that the
    ranks' m-th micro-batches together are one stretch of the global batch.
    """
    size, dp = spec.training.micro_batch_size, spec.parallelism.dp
    length = spec.training.sequence_length + 1
    starts = [(m * dp + dp_rank) * size for m in range(spec.num_microbatches)]
    sequences = [source.sequence(step, start + i, length) for start in starts for i in range(size)]
    return torch.stack(sequences).view(spec.num_microbatches, size, length)


def _random(seed: int, step: int, index: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    # The lowest word counts the numbers drawn, so streams of different (step, index) never meet.
    return np.random.Philox(key=seed % 2**64, counter=[0, 0, index, step]).random_raw(count)


def _text_files(name: str, path: str | None) -> list[Path]:
    root = Path(path) if path else Path(sysconfig.get_path("stdlib"))
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"{name} is neither a file nor a folder; mend the path, or leave it out")
    suffixes = TEXT_SUFFIXES if path else (".py",)
    files = sorted(file for file in root.iterdir() if file.suffix in suffixes and file.is_file())
    if not files:
        raise DataError(f"{name} holds no *{' or *'.join(suffixes)} file; name a file or a folder with such files")
    return files


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror}: {path.name}; mend its permissions") from error
