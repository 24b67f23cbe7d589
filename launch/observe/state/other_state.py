"""What modules keep in checkpoints although no optimizer steps it, such as running statistics and averaged weights.

Training losses do not depend on it, so curves do not show that a replay never updates it. They hardly show that it does not update
a parameter on which the loss depends little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from launch.common.grouped import grouped
from launch.contract.records.sketch import ChangedTensor, Sketch
from launch.contract.records.state_changes import NOT_STEPPED, StateChanges
from launch.contract.spec_ids import digest
from launch.observe.state.modules import modules_of_process
from launch.observe.state.parameters import longest_names, own_part
from launch.observe.state.weight_copies import weight_copies
from launch.train.telemetry.parameter_digest import digest_parameters, sketch_tensors

_Place = tuple[int, str]
"""The id of a module, and a name in it, because a program may replace a tensor by a new one. Copies of weights have id 0."""
_Kept = list[tuple[_Place, torch.Tensor]]


class OtherState:
    """The state at two moments, the first one and the middle. ``stepped`` are the parameters that optimizers step."""

    def __init__(self, stepped: Sequence[torch.Tensor]) -> None:
        kept = _kept_tensors(stepped)
        self._before = self._middle = grouped(_digests(kept))
        self._sketches = grouped(_sketches(kept))
        self._counters = {place: int(tensor) for place, tensor in kept if _is_counter(tensor)}
        self._parameters = _digests_of(stepped)

    def digest_middle(self, stepped: Sequence[torch.Tensor]) -> None:
        self._middle, self._parameters = grouped(_digests(_kept_tensors(stepped))), _digests_of(stepped)

    def changes(self, stepped: Sequence[torch.Tensor], names: Mapping[int, str], steps: int) -> StateChanges:
        """Return what has changed in the ``steps`` since the first moment, and what has not changed since the middle.

        ``names`` maps ids of parameters to names. Leave out constants, and modules that came later. So extra modules of a
        compiled program do not change the result.
        """
        kept, paths = _kept_tensors(stepped), longest_names()
        found = [
            (place, tensor, last)
            for (place, tensor), (_, last) in zip(kept, _digests(kept), strict=True)
            if last not in self._before.get(place, [last])
        ]
        counters: Counter[str] = Counter()
        for place, tensor, _ in found:
            if _is_counter(tensor) and (int(tensor) - self._counters.get(place, 0)) % max(steps, 1) == 0:
                counters[paths.get(place, place[1])] += int(tensor)
        changed = [
            ChangedTensor(one, min(before.distance(one) for before in self._sketches[place]))
            for place, one in _sketches([(place, tensor) for place, tensor, _ in found])
            if place in self._sketches
        ]
        changed.sort(key=lambda one: (one.last.name, one.last.norm))
        unchanged = [names[key] for key, last in _digests_of(stepped).items() if self._parameters.get(key) == last]
        still = [place for place, _, last in found if last in self._middle.get(place, ())]
        unchanged += [f"{paths.get(place, place[1])}{NOT_STEPPED}" for place in still]
        return StateChanges(
            digest=digest(sorted(last for *_, last in found)),
            tensors=len(found),
            counters=counters,
            values=tuple(changed),
            unchanged=tuple(sorted(unchanged)),
        )


def _digests_of(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    return {id(one): digest_parameters([own_part(one.detach())]) for one in parameters}


def _digests(kept: _Kept) -> list[tuple[_Place, str]]:
    return [(place, digest_parameters([tensor])) for place, tensor in kept]


def _sketches(kept: _Kept) -> Iterator[tuple[_Place, Sketch]]:
    """Yield sketches of floats. Signs depend on the name, which is the same in every run."""
    paths = longest_names()
    return ((place, one) for place, tensor in kept for one in sketch_tensors([(paths.get(place, place[1]), tensor)]))


def _is_counter(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_complex()


def _kept_tensors(stepped: Sequence[torch.Tensor]) -> _Kept:
    ids, modules = {*map(id, stepped)}, modules_of_process()
    of_modules = [((id(module), name), one) for module in modules for name, one in _kept(module, ids)]
    return of_modules + [((0, name), one.detach()) for name, one in weight_copies(stepped, modules)]


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
