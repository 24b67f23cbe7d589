"""Fingerprints of results, which a step check keeps instead of copies. They show whether two results differ, and by how much.

Each row of a result has two digests, and each chunk has a sketch. A digest is the sum, modulo 2**64, of the elements' raw bits, each
multiplied by a random number. Different bits have equal digests with a probability below 2**-64. A sketch adds elements with
random signs into a few columns, so the sketch of a difference is the difference of the sketches. Its 2-norm estimates the norm
of the difference with a standard error of about 1.1%. It is exact if the result has no more elements than columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

COLUMNS = 4093
"""A prime number, so that rows and columns of a matrix spread over all columns of the sketch."""
CHUNK_ELEMENTS = 1024 * COLUMNS
"""The number of elements that are read at once."""
ROW_WORDS = 2**18
"""The length of a row of digests. Its random numbers, 4 MiB, stay in the cache of a GPU."""
SIZED_AT_ONCE = 64
"""The number of results whose differences are computed at once. Larger groups need more memory for temporary tensors."""
NOT_FINITE = 1e300
"""The difference of two results if one of them is not finite."""

Results = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Yields results by name. It may hold only one of them at a time."""
Digests = Mapping[str, torch.Tensor]
"""int64 (rows, 2) of each result."""


@dataclass(frozen=True, eq=False)
class Sketch:
    """The sketch of a result, float64 (chunks, columns). ``spacing`` is the relative spacing of the result's numbers."""

    sums: torch.Tensor
    spacing: float

    @property
    def is_number(self) -> bool:
        """Whether the result is a single number."""
        return self.sums.numel() == 1


Sketches = Mapping[str, Sketch]


@dataclass(frozen=True, eq=False)
class Fingerprints:
    digests: Digests
    sketches: Sketches

    def __len__(self) -> int:
        return len(self.digests)

    def unequal(self, digests: Digests) -> list[str]:
        """Return the names of results whose ``digests`` are other ones. The host waits for the device once."""
        if not digests:
            return []
        found, own = torch.cat([*digests.values()]), torch.cat([self.digests[name] for name in digests])
        differs = iter((found != own).any(1).tolist())
        return [name for name, rows in digests.items() if any(list(islice(differs, len(rows))))]


def differences(sketches: Sketches, reference: Sketches, names: Sequence[str]) -> dict[str, float]:
    """Return the 2-norms of the differences of ``names``, relative to the norms of ``reference``. The host waits once.

    Parts that are not finite in both do not count, for example NaN with other bits.
    """
    if not names:
        return {}
    groups = [names[first : first + SIZED_AT_ONCE] for first in range(0, len(names), SIZED_AT_ONCE)]
    norms = torch.cat([_norms([(sketches[name].sums, reference[name].sums) for name in group]) for group in groups], 1)
    return {name: _relative(*each) for name, each in zip(names, norms.T.tolist(), strict=True)}


def _norms(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return float64 (3, pairs): norms of differences, of references, and of where only one of both is finite."""
    lengths = [reference.numel() for _, reference in pairs]
    found, reference = (torch.cat([sums.view(-1) for sums in each]) for each in zip(*pairs, strict=True))
    finite, is_reference = found.isfinite(), reference.isfinite()
    both = finite & is_reference
    parts = (found - reference).where(both, 0.0), reference.where(both, 0.0), (finite != is_reference).double()
    return torch.stack(torch._foreach_norm([one for part in parts for one in part.split(lengths)])).view(3, -1)


def _relative(size: float, scale: float, broken: float) -> float:
    if broken or not (size < NOT_FINITE and scale < NOT_FINITE):
        return NOT_FINITE
    # Positive and negative zeros differ only in their bits.
    return size / scale if scale else (NOT_FINITE if size else 0.0)


class FingerprintMaker:
    """Makes fingerprints of tensors on ``device``, most of which have at most ``most`` elements.

    Compare only fingerprints of one maker.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        # Use a separate generator, so that the run's random numbers do not change.
        generator = torch.Generator(device).manual_seed(1)
        chunk = max(min(most, CHUNK_ELEMENTS), 1)
        shape = 2, min(chunk, ROW_WORDS)
        self._factors = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator, device=device)
        self._signs = torch.randint(0, 2, (chunk,), generator=generator, device=device, dtype=torch.int8) * 2 - 1

    def make(self, results: Results) -> Fingerprints:
        digests, sketches = {}, {}
        for name, flat in self._flat(results):
            digests[name], sketches[name] = self._digest(flat), self._sketch(flat)
        return Fingerprints(digests, sketches)

    def digests(self, results: Results) -> Digests:
        return {name: self._digest(flat) for name, flat in self._flat(results)}

    def sketches(self, results: Results) -> Sketches:
        return {name: self._sketch(flat) for name, flat in self._flat(results)}

    def differences(self, results: Results, reference: Fingerprints) -> dict[str, float]:
        """Return the differences of ``results`` from ``reference``, only for those that differ in a bit."""
        unequal = reference.unequal(self.digests(results))
        sketches = {name: self._sketch(flat) for name, flat in self._flat(results, unequal)} if unequal else {}
        return differences(sketches, reference.sketches, unequal)

    def _flat(self, results: Results, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, result in results():
            if names is None or name in names:
                yield name, result.detach().to(self._factors.device).reshape(-1)

    def _digest(self, flat: torch.Tensor) -> torch.Tensor:
        width = self._factors.shape[1]
        rows = max(len(self._signs) // width, 1)
        return torch.cat([part for block in _words(flat).split(rows * width) for part in self._digest_rows(block)])

    def _digest_rows(self, words: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the digests of whole rows, and of a shorter one at the end."""
        width = self._factors.shape[1]
        whole = len(words) - len(words) % width
        if whole:
            yield (words[:whole].view(-1, 1, width) * self._factors).sum(-1)
        if whole < len(words) or not whole:
            yield (words[whole:] * self._factors[:, : len(words) - whole]).sum(-1)[None]

    def _sketch(self, flat: torch.Tensor) -> Sketch:
        columns = max(min(len(flat), COLUMNS), 1)
        sums = torch.stack([self._sums(chunk, columns) for chunk in flat.split(len(self._signs))])
        return Sketch(sums, torch.finfo(flat.dtype).eps)

    def _sums(self, chunk: torch.Tensor, columns: int) -> torch.Tensor:
        """Return the sketch of ``chunk``, float64 (columns,). A multiplication by 1 or -1 does not round."""
        signed = chunk * self._signs[: len(chunk)]
        if lacking := -len(chunk) % columns:
            signed = torch.nn.functional.pad(signed, (0, lacking))
        return signed.view(-1, columns).sum(0, dtype=torch.float64)


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``flat`` as integers of 4 bytes, or of an element's size if they do not fill whole words."""
    if flat.nbytes % 4:
        return flat.view({1: torch.int8, 2: torch.int16}[flat.itemsize])
    aligned = flat if flat.storage_offset() * flat.itemsize % 4 == 0 else flat.clone()
    return aligned.view(torch.int32)
