"""Copies of the weights that no module holds, such as a list or a dictionary of averaged weights."""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from launch.observe.state.parameters import plain_name
from launch.train.telemetry.parameter_digest import CHUNK_ELEMENTS

MOST_DISTANT = 0.5
"""Averages of weights are nearer to them than this share of their norm. Lists of gradients and moments, which have the same shapes,
are not."""
_PLAIN = (torch.Tensor, nn.Parameter)
_Named = list[tuple[str, torch.Tensor]]


def weight_copies(stepped: Sequence[torch.Tensor], modules: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors of each list and dictionary that holds a copy of all weights, with the names of the weights.

    They have the shapes of all ``stepped`` parameters, or of all weights of a module with one of them, in the same order and on
    the same device. They are near these in their values, and share no memory with any module or with ``stepped``.
    """
    known, owned = _weights_by_shapes(stepped, modules)
    for container in gc.get_objects():
        if type(container) not in (list, dict) or not container:
            continue
        values = container.values() if type(container) is dict else container
        # Most containers end here, and there may be a million.
        if type(next(iter(values))) not in _PLAIN:
            continue
        found = [*values]
        for weights in known.get(shapes, ()) if (shapes := _shapes(found)) else ():
            if owned.isdisjoint(map(_memory, found)) and _are_near(found, [one for _, one in weights]):
                yield from zip((f"copy of {name}" for name, _ in weights), found, strict=True)
                break


def _weights_by_shapes(
    stepped: Sequence[torch.Tensor], modules: Sequence[nn.Module]
) -> tuple[Mapping[tuple[object, ...], list[_Named]], set[int]]:
    """Return what a copy may be of, and the memory that is no copy."""
    ids, owned = {*map(id, stepped)}, {*map(_memory, stepped)}
    candidates: list[_Named] = []
    for module in modules:
        owned |= {_memory(one) for one in (*module._parameters.values(), *module._buffers.values()) if one is not None}
        named: _Named = [*module.named_parameters()]
        if ids.isdisjoint(id(one) for _, one in named):
            continue
        kept = [
            (f"{path}.{name}".removeprefix("."), one)
            for path, part in module.named_modules()
            for name, one in (*part._parameters.items(), *part._buffers.items())
            if one is not None and name not in part._non_persistent_buffers_set
        ]
        candidates += [named, [(name, one) for name, one in named if one.requires_grad], kept]
    known: dict[tuple[object, ...], list[_Named]] = defaultdict(list)
    # The names are the same in every run, in whatever order modules are in memory.
    candidates = [[(plain_name(name), one) for name, one in weights] for weights in candidates]
    candidates.sort(key=lambda weights: (sum(len(name) for name, _ in weights), [name for name, _ in weights]))
    for weights in (*candidates, [(f"parameter {place}", one) for place, one in enumerate(stepped)]):
        if len(weights) > 1 and (shapes := _shapes([one for _, one in weights])):
            known[shapes].append(weights)
    return known, owned


def _shapes(tensors: Sequence[object]) -> tuple[object, ...]:
    """Return the shapes and devices of plain tensors with memory, or () if one is something else."""
    shapes: list[object] = []
    for one in tensors:
        # Ask for the type first, as in launch/observe/state/modules.py.
        if type(one) not in _PLAIN or not isinstance(one, torch.Tensor):
            return ()
        if one.layout is not torch.strided or one.is_quantized:
            return ()
        if one.device.type == "meta" or (one.numel() and not one.untyped_storage().nbytes()):
            return ()
        shapes += (one.shape, one.device)
    return tuple(shapes)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if type(tensor) in _PLAIN else id(tensor)


def _are_near(copy: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> bool:
    """Return whether the distance between them is small. The host waits once."""
    sums = [
        torch.stack([(one - other).square().sum(), other.square().sum()])
        for tensor, weight in zip(copy, weights, strict=True)
        if tensor.is_floating_point() and weight.is_floating_point()
        for pieces in zip(*(each.detach().reshape(-1).split(CHUNK_ELEMENTS) for each in (tensor, weight)), strict=True)
        for one, other in [[piece.double() for piece in pieces]]
    ]
    distance, norm = torch.stack(sums).sum(dim=0).tolist() if sums else (0.0, 0.0)
    return math.sqrt(distance) < MOST_DISTANT * math.sqrt(norm)
