"""Recognise gradient norms that show nothing: clipped ones, and those that nobody computed."""

from __future__ import annotations

import math

import numpy as np

from analysis.records.steps import Floats

SHOWS_NOTHING = "a norm that is clipped, printed too coarsely or not computed shows nothing"
_SPREAD = 1e-5
"""The relative variation of a clipped norm by rounding."""


def describe_constant(norms: Floats) -> str:
    """Describe ``norms``, shape (steps,), that have one value at more than half of the steps; return "" if they do not.

    A clipped norm has one value, except for rounding, and so has a norm that was never computed. Such a norm is equal on both
    sides, whatever graphs compute.
    """
    middle = float(np.median(norms)) if len(norms) else math.nan
    equal = int(np.sum(np.isclose(norms, middle, _SPREAD, 0)))
    return f"is {middle:g} at {equal} of {len(norms)} steps" if 1 < len(norms) < 2 * equal else ""
