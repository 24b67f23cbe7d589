"""A digest of a rank's parameters. It shows whether the optimizer has changed any of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

CHUNK_ELEMENTS = 2**20
"""The number of elements processed at once. It bounds temporary memory to a few times their size in int64."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
"""An odd constant (SplitMix64's), as a signed integer."""


def digest_parameters(parameters: Iterable[torch.Tensor]) -> str:
    """Return the sum of all elements' bits, each weighted by its position, modulo 2 ** 64, in hexadecimal digits.

    A change of one or two elements always changes the digest, so updates of opposite sign do not cancel. The host waits for the
    device once.
    """
    sums, place = [], 1
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        for piece in flat.view(_INTEGERS[flat.element_size()]).split(CHUNK_ELEMENTS):
            weights = torch.arange(place, place + len(piece), device=piece.device).mul_(_SPREAD)
            sums.append(weights.mul_(piece).sum())
            place += len(piece)
    return f"{int(torch.stack(sums).sum()) % 2**64:016x}" if sums else ""
