"""A digest of a rank's parameters, which shows whether the optimizer has changed any, and sketches, which show how far runs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from zlib import crc32

import torch
from torch.nn.functional import pad

from launch.contract.records.parameter_sketch import SUMS, ParameterSketch
from launch.train.telemetry.event_log import Recorder

CHUNK_ELEMENTS = 2**20
"""The number of elements processed at once. It bounds temporary memory to a few times their size in int64."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = 0x9E3779B97F4A7C15 - 2**64
"""An odd constant (SplitMix64's), as a signed integer."""
Sums = Mapping[str, tuple[float, ...]]
"""The sums of each parameter, by its name."""


def write_parameters(recorder: Recorder, named: Iterable[tuple[str, torch.Tensor]], begun: Sums) -> Sums:
    """Write the digest of parameters, and sketches of those whose sums had ``begun`` otherwise. Return their sums."""
    parameters = dict(named)
    sums = sum_parameters(parameters)
    digest = digest_parameters(parameters.values())
    recorder.write("parameters", digest=digest, sketches=sketches_since(begun, sums))
    return sums


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


def sum_parameters(parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, ...]]:
    """Return the sums of launch.contract.records.parameter_sketch, of floats. The host waits for the device once."""
    floats = {name: parameter for name, parameter in parameters.items() if parameter.is_floating_point()}
    rows = torch.stack([_sums_of(one, crc32(name.encode())) for name, one in floats.items()]).tolist() if floats else []
    return {name: tuple(row) for name, row in zip(floats, rows, strict=True)}


def _sums_of(parameter: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the sums, float64 (SUMS,). The program's own random numbers do not change."""
    flat = parameter.detach().reshape(-1)
    generator = torch.Generator(flat.device).manual_seed(seed)
    sums = torch.zeros(SUMS, dtype=torch.float64, device=flat.device)
    for piece in flat.split(CHUNK_ELEMENTS):
        signs = (
            torch.randint(2, piece.shape, generator=generator, device=piece.device, dtype=torch.int8).mul_(2).sub_(1)
        )
        sums += pad(signs * piece.double(), (0, -len(piece) % SUMS)).view(-1, SUMS).sum(dim=0)
    return sums


def sketches_since(begun: Sums, ended: Sums) -> tuple[ParameterSketch, ...]:
    """Return the sketches of parameters with these sums at two moments. Leave out those that are new or not finite."""
    known = ((name, begun[name], sums) for name, sums in ended.items() if name in begun)
    return tuple(
        ParameterSketch(name, math.dist(before, sums), sums)
        for name, before, sums in known
        if all(map(math.isfinite, (*before, *sums)))
    )
