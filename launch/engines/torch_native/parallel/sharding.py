"""How ranks share the parameters of the whole model: which part of each a rank holds, and what its gradient there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from launch.engines.torch_native.parallel.process_groups import Group


@dataclass(frozen=True)
class Sharding:
    """One parameter's. Without an ``axis`` every rank of a stage holds it whole."""

    axis: Literal["tp", "ep"] | None = None
    dim: int = 0
    """The dimension that is split."""
    sections: tuple[int, ...] = ()
    """Sizes along ``dim`` of stretches of the whole that are each split by themselves: queries, keys and values, or gate
    and up. Empty is one stretch."""
    partial: bool = False
    """Of a parameter held whole: a tensor-parallel rank's gradient is of its own tokens, and their sum is the gradient
    (sequence parallelism). Otherwise every tensor-parallel rank has the whole gradient."""

    def take(self, whole: torch.Tensor, group: Group) -> torch.Tensor:
        """This rank's part of the whole parameter, a view or a copy."""
        if self.axis is None or group.size == 1:
            return whole
        stretches = whole.split(list(self.sections) or whole.shape[self.dim], dim=self.dim)
        return torch.cat([stretch.chunk(group.size, self.dim)[group.rank] for stretch in stretches], self.dim)


WHOLE = Sharding()


def shardings_of(module: nn.Module) -> dict[str, Sharding]:
    """Of every parameter of ``module`` by its full name. A module names those of its own parameters that are not held
    whole, with whole gradients, in an attribute ``shardings``."""
    own: dict[str, Sharding] = {}
    for prefix, child in module.named_modules():
        declared = getattr(child, "shardings", {})
        own |= {f"{prefix}.{name}".lstrip("."): sharding for name, sharding in declared.items()}
    return {name: own.get(name, WHOLE) for name, _ in module.named_parameters()}
