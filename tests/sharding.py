"""Join the parts that ranks hold to whole parameters."""

from __future__ import annotations

import torch

from launch.engines.torch_native.parallel.sharding import Sharding


def join_parts(sharding: Sharding, parts: list[torch.Tensor]) -> torch.Tensor:
    """Invert ``Sharding.take``, from the parts of all ranks in order."""
    if sharding.axis is None or len(parts) == 1:
        return parts[0]
    sizes = [size // len(parts) for size in sharding.sections] or parts[0].shape[sharding.dim]
    sections = zip(*(part.split(sizes, dim=sharding.dim) for part in parts), strict=True)
    return torch.cat([torch.cat(pieces, sharding.dim) for pieces in sections], sharding.dim)
