"""What modules keep in checkpoints although no optimizer steps it, such as running statistics and averaged weights.

Training losses do not depend on it, so curves do not show that a replay never updates it.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
from torch import nn

from launch.contract.records.state_changes import StateChanges
from launch.contract.spec_ids import digest
from launch.observe.gradient_sketches import own_part
from launch.observe.modules import modules_of_process
from launch.train.telemetry.parameter_digest import digest_parameters


class OtherState:
    """The state at one moment. ``stepped`` are the ids of the parameters that optimizers step."""

    def __init__(self, stepped: Set[int]) -> None:
        self._before = _digests(stepped)

    def changes(self, stepped: Set[int]) -> StateChanges:
        """Return which tensors have changed since that moment.

        It leaves constants out, and modules that came later. So extra modules of a compiled program do not change it.
        """
        now = _digests(stepped)
        found = sorted(last for place, last in now.items() if self._before.get(place, last) != last)
        return StateChanges(digest(found), len(found))


def _digests(stepped: Set[int]) -> dict[tuple[int, str], str]:
    """Return digests by module and name, because a program may replace a tensor by a new one."""
    return {
        (id(module), name): digest_parameters([tensor])
        for module in modules_of_process()
        for name, tensor in _kept(module, stepped)
    }


def _kept(module: nn.Module, stepped: Set[int]) -> Iterator[tuple[str, torch.Tensor]]:
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
