"""What modules keep in checkpoints although no optimizer steps it, such as running statistics and averaged weights.

Training losses do not depend on it, so curves do not show that a replay never updates it. They hardly show that it does not update
a parameter on which the loss depends little.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from zlib import crc32

import torch
from torch import nn

from launch.contract.records.gradient_sketch import PROJECTIONS, GradientSketch
from launch.contract.records.state_changes import ChangedTensor, StateChanges
from launch.contract.spec_ids import digest
from launch.observe.gradient_sketches import longest_names, own_part, sketch_values
from launch.observe.modules import modules_of_process
from launch.train.telemetry.parameter_digest import digest_parameters

_Place = tuple[int, str]
"""The id of a module, and a name in it. A program may replace a tensor by a new one."""


class OtherState:
    """The state at one moment. ``stepped`` are the parameters that optimizers step."""

    def __init__(self, stepped: Sequence[torch.Tensor]) -> None:
        self._parameters = _digests_of(stepped)
        self._before = _digests(kept := _kept_tensors(stepped))
        self._sketches = _sketches(kept)

    def changes(self, stepped: Sequence[torch.Tensor], names: Mapping[int, str]) -> StateChanges:
        """Return what has changed since that moment, and what has not. ``names`` maps ids of parameters to names.

        It leaves constants out, and modules that came later. So extra modules of a compiled program do not change it.
        """
        kept = _kept_tensors(stepped)
        now = _digests(kept)
        found = {place: last for place, last in now.items() if self._before.get(place, last) != last}
        counters = sorted(last for place, last in found.items() if _is_counter(kept[place]))
        changed = [
            ChangedTensor(one, self._sketches[place].distance(one))
            for place, one in _sketches({place: kept[place] for place in found}).items()
            if place in self._sketches
        ]
        changed.sort(key=lambda one: (one.last.name, one.last.norm))
        parameters = _digests_of(stepped)
        unchanged = [names.get(key, "") for key, last in parameters.items() if self._parameters.get(key) == last]
        return StateChanges(
            digest(sorted(found.values())), len(found), digest(counters), tuple(changed), tuple(sorted(unchanged))
        )


def _digests_of(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    return {id(one): digest_parameters([own_part(one.detach())]) for one in parameters}


def _digests(kept: Mapping[_Place, torch.Tensor]) -> dict[_Place, str]:
    return {place: digest_parameters([tensor]) for place, tensor in kept.items()}


def _sketches(kept: Mapping[_Place, torch.Tensor]) -> dict[_Place, GradientSketch]:
    """Return sketches of floats. Signs depend on the name, which is the same in every run."""
    paths, found = longest_names(), {}
    for place, tensor in kept.items():
        if tensor.is_floating_point():
            name = paths.get(place, place[1])
            row = sketch_values(tensor, crc32(name.encode())).tolist()
            if all(map(math.isfinite, row)):
                found[place] = GradientSketch(name, row[0], tuple(row[1 : 1 + PROJECTIONS]))
    return found


def _is_counter(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_complex()


def _kept_tensors(stepped: Sequence[torch.Tensor]) -> dict[_Place, torch.Tensor]:
    ids = {*map(id, stepped)}
    return {(id(module), name): tensor for module in modules_of_process() for name, tensor in _kept(module, ids)}


def _kept(module: nn.Module, stepped: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a checkpoint of ``module`` itself holds. Leave out quantized tensors, and those without memory."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None or name in module._non_persistent_buffers_set:
            continue
        # Megatron's optimizers step a copy of the parameter.
        if {id(tensor), id(getattr(tensor, "main_param", None))} & stepped:
            continue
        part = own_part(tensor.detach())
        plain = type(part) is torch.Tensor and part.layout is torch.strided and not part.is_quantized
        if plain and part.element_size() <= 8 and (not part.numel() or _has_memory(part)):
            yield name, part


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return False for tensors of the meta device, and for parts that sharding has freed."""
    return tensor.device.type != "meta" and tensor.untyped_storage().nbytes() > 0
