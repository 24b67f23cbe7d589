"""The smallest error that another kernel could make: one unit in the last place."""

from __future__ import annotations

import math

import torch


def next_after(values: torch.Tensor) -> torch.Tensor:
    """Return the next larger number of each value, with the gradient of the value."""
    with torch.no_grad():
        unit = torch.nextafter(values, torch.full_like(values, math.inf)) - values
    return values + unit
