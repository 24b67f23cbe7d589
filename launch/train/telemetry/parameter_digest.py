"""Digests of parameters, which show whether an optimizer has changed any, and sketches of tensors, which show how far runs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from zlib import crc32

import torch
from torch.nn.functional import pad

from launch.contract.records.sketch import SUMS, ChangedTensor, Sketch
from launch.train.telemetry.event_log import Recorder

CHUNK_ELEMENTS = 2**20
"""The number of elements processed at once. It bounds temporary memory to a few times their size in int64."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""The integers that make up an element of this size. Modulo 2 ** 64, an even weight would lose the highest bit of 64."""
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
"""An odd constant (SplitMix64's), as a signed integer."""


def write_parameters(
    recorder: Recorder, named: Iterable[tuple[str, torch.Tensor]], begun: Iterable[Sketch]
) -> tuple[Sketch, ...]:
    """Write the digest of parameters, and how they have changed since ``begun``. Return their sketches."""
    parameters = dict(named)
    ended = sketch_tensors(parameters.items())
    digest = digest_parameters(parameters.values())
    recorder.write("parameters", digest=digest, sketches=changes_since(begun, ended))
    return ended


def digest_parameters(parameters: Iterable[torch.Tensor]) -> str:
    """Return the sum of all elements' bits, each weighted by its position, modulo 2 ** 64, in hexadecimal digits.

    A change of one element always changes the digest, and equal changes of two elements do not cancel, whatever their signs. The host
    waits for the device once.
    """
    sums, place = [], 1
    for parameter in parameters:
        flat = _real(parameter).reshape(-1).contiguous()
        for piece in flat.view(_INTEGERS[flat.element_size()]).split(CHUNK_ELEMENTS):
            weights = torch.arange(place, place + len(piece), device=piece.device).mul_(_SPREAD)
            sums.append(weights.mul_(piece).sum())
            place += len(piece)
    return f"{int(torch.stack(sums).sum()) % 2**64:016x}" if sums else ""


def sketch_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[Sketch, ...]:
    """Return sketches of tensors, except those that are whole numbers or not finite. The host waits for the device once."""
    floats = [(name, real) for name, tensor in named if (real := _real(tensor)).is_floating_point()]
    rows = torch.stack([_sketch(one, crc32(name.encode())) for name, one in floats]).tolist() if floats else []
    # With loss scaling, gradients may overflow in the first steps.
    finite = ((name, row) for (name, _), row in zip(floats, rows, strict=True) if math.isfinite(row[0]))
    return tuple(Sketch(name, norm, tuple(sums)) for name, (norm, *sums) in finite)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with the real and the imaginary part of each complex number in a row of its own."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()


def _sketch(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the norm and the sums, float64 (1 + SUMS,). The program's own random numbers do not change."""
    flat = tensor.reshape(-1)
    generator = torch.Generator(flat.device).manual_seed(seed)
    found = torch.zeros(1 + SUMS, dtype=torch.float64, device=flat.device)
    for piece in flat.split(CHUNK_ELEMENTS):
        signs = (
            torch.randint(2, piece.shape, generator=generator, device=piece.device, dtype=torch.int8).mul_(2).sub_(1)
        )
        exact = piece.double()
        found[0] += exact.square().sum()
        found[1:] += pad(signs * exact, (0, -len(piece) % SUMS)).view(-1, SUMS).sum(dim=0)
    found[0].sqrt_()
    return found


def changes_since(begun: Iterable[Sketch], ended: Iterable[Sketch]) -> tuple[ChangedTensor, ...]:
    """Return how tensors with these sketches have changed between two moments. Leave out new ones."""
    known = {one.name: one for one in begun}
    return tuple(ChangedTensor(one, one.distance(known[one.name])) for one in ended if one.name in known)
