"""The part of each parameter that a rank has, and whether its gradient there is partial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from launch.engines.torch_native.parallel.process_groups import Group


@dataclass(frozen=True)
class Sharding:
    """How one parameter is sharded. Without an ``axis`` every rank of a stage has it whole."""

    axis: Literal["tp", "ep"] | None = None
    dim: int = 0
    """The dimension that is split."""
    sections: tuple[int, ...] = ()
    """Sizes along ``dim`` of the sections that are split separately: queries, keys and values, or gate and up. Empty means one
    section."""
    partial: bool = False
    """For a whole parameter: whether a tensor-parallel rank's gradient covers only its own tokens or heads, so that the ranks'
    gradients must be summed. Otherwise every tensor-parallel rank has the whole gradient."""

    def take(self, whole: torch.Tensor, group: Group) -> torch.Tensor:
        """Return this rank's part of the whole parameter: a view or a copy, with ``dim`` divided by the group's size."""
        if self.axis is None or group.size == 1:
            return whole
        sections = whole.split(list(self.sections) or whole.shape[self.dim], dim=self.dim)
        return torch.cat([section.chunk(group.size, self.dim)[group.rank] for section in sections], self.dim)


WHOLE = Sharding()


def find_shardings(module: nn.Module) -> dict[str, Sharding]:
    """Return the sharding of every parameter of ``module``, by its full name.

    A module lists its own parameters in an attribute ``shardings``. Parameters that no module lists are whole.
    """
    own: dict[str, Sharding] = {}
    for prefix, child in module.named_modules():
        declared = getattr(child, "shardings", {})
        own |= {f"{prefix}.{name}".lstrip("."): sharding for name, sharding in declared.items()}
    return {name: own.get(name, WHOLE) for name, _ in module.named_parameters()}
