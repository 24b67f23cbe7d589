"""The tokens of a step: a sequence is a pure function of (seed, step, its index in the global batch).

So all layouts and both runs of a pair see the same tokens, and any sequence can be read without the previous ones. Random
numbers are counter-based: Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) with the seed as its
key and (step, index) as its counter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from launch.contract.errors import DataError
from launch.contract.spec import Data, Model, RunSpec
from launch.data.fields import check_length
from launch.data.indexed_dataset import IndexedDataset, open_pair
from launch.data.text_files import Text, read_text
from launch.support import data_fields
from launch.support.rule import judge, refuse


class TokenSource(Protocol):
    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal digits."""

    def sequence(self, step: int, index: int, length: int) -> torch.Tensor:
        """Return sequence ``index`` of the global batch of ``step``: int64 of shape (length,).

        Raises:
            DataError: the source is shorter than ``length``, or a token is not in the vocabulary.
        """


@dataclass(frozen=True, eq=False)
class StreamSource:
    """A stream of tokens. A sequence begins at any token and may cross documents.

    Megatron-Core's GPTDataset also cuts its stream across documents, in steps of the sequence length.
    """

    stream: Text | IndexedDataset
    vocab_size: int
    seed: int

    @property
    def digest(self) -> str:
        return self.stream.digest

    def sequence(self, step: int, index: int, length: int) -> torch.Tensor:
        held = len(self.stream.tokens)
        check_length(self.stream.name, held, length)
        places = held - length + 1
        start = int(_random(self.seed, step, index, 1)[0] % np.uint64(places))
        tokens = np.array(self.stream.tokens[start : start + length], np.int64)
        self._check_vocabulary(tokens, start)
        return torch.from_numpy(tokens)

    def _check_vocabulary(self, tokens: npt.NDArray[np.int64], start: int) -> None:
        """Check tokens on the host. On a device, an index outside the embedding is undefined behaviour or ends the process."""
        outside = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if outside.size:
            place = int(outside[0])
            raise DataError(
                f"{self.stream.name} holds token {tokens[place]} at position {start + place}, which is not in the "
                f"vocabulary of model.vocab_size={self.vocab_size}; set it to the vocabulary of the "
                f"tokenizer that wrote the data, or name other data"
            )


@dataclass(frozen=True)
class SyntheticSource:
    """Uniformly random tokens below ``vocab_size``, to measure speed. A model cannot learn anything from them."""

    vocab_size: int
    seed: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"synthetic {self.vocab_size} {self.seed}".encode()).hexdigest()

    def sequence(self, step: int, index: int, length: int) -> torch.Tensor:
        tokens = _random(self.seed, step, index, length) % np.uint64(self.vocab_size)
        return torch.from_numpy(tokens.astype(np.int64))


def open_source(data: Data, vocab_size: int, seed: int) -> TokenSource:
    """Open the source that ``data`` describes.

    Raises:
        DataError: the fields contradict each other or ``vocab_size``, or a file is missing, empty, unreadable or damaged.
        EnvironmentFault: the tokenizers library is needed but not installed.
    """
    refuse(judge(data_fields.RULES, RunSpec(model=Model(vocab_size=vocab_size), data=data)), DataError)
    if data.kind == "synthetic":
        return SyntheticSource(vocab_size, seed)
    if data.kind == "indexed" and data.path is not None:
        return StreamSource(open_pair(data.path), vocab_size, seed)
    return StreamSource(read_text(data, vocab_size), vocab_size, seed)


def batch(source: TokenSource, spec: RunSpec, step: int, dp_rank: int) -> torch.Tensor:
    """Return one rank's tokens of a step: int64 of shape (micro-batches, micro-batch size, sequence length + 1).

    Micro-batch m of data-parallel rank r starts at sequence (m * dp + r) * micro-batch size. The ranks' m-th micro-batches
    are therefore contiguous in the global batch.
    """
    size, dp = spec.training.micro_batch_size, spec.parallelism.dp
    length = spec.training.sequence_length + 1
    starts = [(m * dp + dp_rank) * size for m in range(spec.num_microbatches)]
    sequences = [source.sequence(step, start + i, length) for start in starts for i in range(size)]
    return torch.stack(sequences).view(spec.num_microbatches, size, length)


def check_documents(source: TokenSource, spec: RunSpec, dp_rank: int) -> None:
    """Check that none of a rank's packed sequences has more documents than ``data.max_documents``, before the first step.

    Raises:
        DataError: a sequence has more. The message has the most documents of all steps.
    """
    if spec.data.max_documents is None or spec.data.eod_token is None:
        return
    # The last token is a label only, so an end just before it begins no document.
    ends = (batch(source, spec, step, dp_rank)[..., :-2].eq(spec.data.eod_token) for step in range(spec.training.steps))
    documents = [int(end.sum(-1).max()) + 1 for end in ends]
    most = max(documents)
    if most > spec.data.max_documents:
        raise DataError(
            f"a sequence of step {documents.index(most)} holds {most} documents, which is more than data.max_documents="
            f"{spec.data.max_documents}; set data.max_documents to {most} or more, or shorten training.sequence_length"
        )


def _random(seed: int, step: int, index: int, count: int) -> npt.NDArray[np.uint64]:
    # The lowest word of the counter counts the drawn numbers, so streams of different (step, index) never overlap.
    return np.random.Philox(key=seed % 2**64, counter=[0, 0, index, step]).random_raw(count)
