"""The weight of an RMSNorm; layers/pointwise.py has its formula."""

from __future__ import annotations

import torch
from torch import nn

from launch.engines.torch_native.parallel.sharding import Sharding


class Norm(nn.Module):
    """``sharding`` says what a rank's gradient of the weight, which every rank holds whole, is of."""

    def __init__(self, width: int, sharding: Sharding) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.shardings = {"weight": sharding}
