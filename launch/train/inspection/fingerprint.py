"""Fingerprints of results, which a step check keeps instead of copies. They show whether two results differ, and by how much.

Each chunk of a result has two digests and a sketch. A digest is the sum, modulo 2**64, of the elements' raw bits, each
multiplied by a random number. Different bits have equal digests with a probability below 2**-64. A sketch adds elements with
random signs into a few columns, so the sketch of a difference is the difference of the sketches. Its 2-norm estimates the norm
of the difference with a standard error of about 1.1%. It is exact if the result has no more elements than columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

COLUMNS = 4093
"""A prime number, so that rows and columns of a matrix spread over all columns of the sketch."""
CHUNK_ELEMENTS = 1024 * COLUMNS
NOT_FINITE = 1e300
"""The difference of two results if one of them is not finite."""
_INTEGERS = {1: torch.int8, 2: torch.int16}
"""The integer type for the bits of an element, by its size in bytes. Larger elements are read as several of 4 bytes."""


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Digests, int64 (chunks, 2), and sketches, float64 (chunks, columns). ``spacing`` is the relative spacing of numbers."""

    digests: torch.Tensor
    sketches: torch.Tensor
    spacing: float

    @property
    def is_number(self) -> bool:
        """Whether the result is a single number."""
        return self.sketches.numel() == 1

    def difference(self, reference: Fingerprint) -> float | None:
        """Return the 2-norm of the difference relative to the norm of ``reference``, or None if both have equal bits.

        Parts that are not finite in both do not count, for example NaN with other bits.
        """
        if torch.equal(self.digests, reference.digests):
            return None
        finite = self.sketches.isfinite()
        if not torch.equal(finite, reference.sketches.isfinite()):
            return NOT_FINITE
        norms = torch.stack(((self.sketches - reference.sketches)[finite], reference.sketches[finite])).norm(dim=1)
        size, scale = norms.tolist()
        if not (size < NOT_FINITE and scale < NOT_FINITE):
            return NOT_FINITE
        # Positive and negative zeros differ only in their bits.
        return size / scale if scale else (NOT_FINITE if size else 0.0)


class FingerprintMaker:
    """Makes fingerprints of tensors with at most ``most`` elements, on ``device``. Compare only fingerprints of one maker."""

    def __init__(self, most: int, device: torch.device) -> None:
        # Use a separate generator, so that the run's random numbers do not change.
        generator = torch.Generator(device).manual_seed(1)
        shape = 2, max(min(most, CHUNK_ELEMENTS), 1)
        self._factors = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator, device=device)
        self._signs = 1 - 2 * (self._factors[0] < 0).to(torch.int8)

    def make(self, results: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, Fingerprint]:
        device = self._factors.device
        return {name: self._make(result.detach().to(device).reshape(-1)) for name, result in results}

    def _make(self, flat: torch.Tensor) -> Fingerprint:
        bits = flat.view(_INTEGERS.get(flat.itemsize, torch.int32)).split(len(self._signs))
        digests = [(chunk * self._factors[:, : len(chunk)]).sum(1) for chunk in bits]
        columns = max(min(len(flat), COLUMNS), 1)
        sketches = [self._sketch(chunk, columns) for chunk in flat.split(len(self._signs))]
        return Fingerprint(torch.stack(digests), torch.stack(sketches), torch.finfo(flat.dtype).eps)

    def _sketch(self, chunk: torch.Tensor, columns: int) -> torch.Tensor:
        """Return the sketch of ``chunk``, float64 (columns,). A multiplication by 1 or -1 does not round."""
        signed = chunk * self._signs[: len(chunk)]
        return torch.nn.functional.pad(signed, (0, -len(chunk) % columns)).view(-1, columns).sum(0, dtype=torch.float64)
