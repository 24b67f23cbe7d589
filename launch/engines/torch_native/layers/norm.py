"""The weight of an RMSNorm. Its formula is in layers/pointwise.py."""

from __future__ import annotations

import torch
from torch import nn

from launch.engines.torch_native.parallel.sharding import Sharding


class Norm(nn.Module):
    """The weight of an RMSNorm, whole on every rank. ``sharding`` determines whether its gradient is partial."""

    def __init__(self, width: int, sharding: Sharding) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.shardings = {"weight": sharding}
