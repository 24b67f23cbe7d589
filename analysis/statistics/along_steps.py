"""The standard error of a weighted sum of a series whose values depend on each other."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from analysis.statistics.standard_error import StandardError

Floats = NDArray[np.float64]
_ROUNDING = 1e-12
"""Rounding error of the residuals of a line fit, relative to the largest difference."""


def along_steps(difference: Floats, weights: Floats, *, white: bool = False) -> StandardError:
    """Return the standard error under an AR(1) model of ``difference``, shape (steps,), or without correlation if ``white``.

    The autocorrelation and the variance are those of the residuals of a line fit, so a drift does not count as noise. Both are
    corrected for the bias of the line fit. The lag-one autocorrelation r of n steps is biased low by about
    (2 + 4 r) / n (by (1 + 3 r) / n if only a mean is removed: Kendall 1954, doi:10.1093/biomet/41.3-4.403). The variance is
    biased low by the share that the line absorbs. The degrees of freedom are n (1 - r^2) / (1 + r^2) - 2.
    """
    steps = len(difference)
    largest = float(np.abs(difference).max())
    if not largest:
        return StandardError(0.0, steps - 2)
    # Scale first: the square of a large difference can overflow.
    line, relative = _line(steps), difference / largest
    residuals = relative - line.T @ (line @ relative)
    squares = float(residuals @ residuals)
    if squares <= _ROUNDING**2 * steps:
        return StandardError(0.0, steps - 2)
    lag_one = float(residuals[1:] @ residuals[:-1]) / squares
    r = 0.0 if white else min(max((steps * lag_one + 2) / (steps - 4), 0.0), 1 - 1 / steps)
    absorbed = sum(variance_factor(part, r) for part in line) / steps
    variance = squares / steps / (1 - min(absorbed, 0.5))
    degrees = max(1.0, steps * (1 - r**2) / (1 + r**2) - 2)
    return StandardError(largest * math.sqrt(variance * variance_factor(weights, r)), degrees)


@lru_cache(maxsize=16)
def _line(steps: int) -> Floats:
    """Return an orthonormal basis of all lines over the steps, shape (2, steps)."""
    place = np.arange(steps) - (steps - 1) / 2
    return np.stack([np.full(steps, steps**-0.5), place / np.sqrt(place @ place)])


def variance_factor(weights: Floats, r: float) -> float:
    """Return the variance of a weighted sum relative to the variance of one step, if steps k apart have correlation r^k."""
    products = _lagged_products(weights.tobytes())
    return float(products[0] + 2 * (products[1:] @ r ** np.arange(1, len(products))))


@lru_cache(maxsize=16)
def _lagged_products(weights: bytes) -> Floats:
    """Return the sum over t of w(t) w(t + k) for each lag k from 0, shape (steps,). ``weights`` has the bytes of float64."""
    values = np.frombuffer(weights)
    spectrum = np.fft.rfft(values, 2 * len(values))
    products: Floats = np.fft.irfft(spectrum * spectrum.conj())[: len(values)]
    return products
