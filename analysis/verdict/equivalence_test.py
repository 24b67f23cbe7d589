"""Rung 3: two one-sided tests that a difference lies within its margin, whatever noise and autocorrelation there is.

What is tested is the mean over the steps of the difference between the mean graphed and the mean eager curve. With
estimate d, standard error s and margin M, both one-sided tests reject at level alpha where (M - |d|) / s exceeds Student's
quantile (Schuirmann 1987, doi:10.1007/BF01068419). The error is estimated twice, and both have to do:

- between repeats: each run's mean is one observation, and the pooled variance of two groups gives the error of
  the difference of their means. However steps depend on each other within a run, this holds. With few repeats it is wide.
- along the steps: differences as an autoregressive process of order one, of which n steps are worth
  n (1 - r) / (1 + r) independent ones. It sees noise that only graphed runs have where just one of them was made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from analysis.records.steps import Floats
from analysis.statistics.student_t import quantile, upper_tail
from analysis.verdict.curve_difference import Estimate, Sample

ALPHA = 0.05
"""How often a difference at its margin may pass."""
_ROUNDING = 1e-12
"""What is left of a line by rounding, as a share of the largest difference."""


@dataclass(frozen=True)
class StandardError:
    """Of a weighted sum, with the degrees of freedom that it was estimated with (1 or more)."""

    size: float
    degrees: float

    @property
    def half_width(self) -> float:
        return quantile(1 - ALPHA, self.degrees) * self.size

    def p(self, distance: float) -> float:
        """How likely an estimate so far within the margin is if the truth is at the margin; 1 where nothing is known."""
        if not (math.isfinite(distance) and math.isfinite(self.size)) or distance <= 0:
            return 1.0
        return upper_tail(distance / self.size, self.degrees) if self.size > 0 else 0.0


def estimate_of(sample: Sample, weights: Floats) -> Estimate:
    """The weighted sum over the steps of the difference, of two eager runs or more. ``weights`` has shape (steps,)."""
    value, errors = _weighed(sample, weights)
    return Estimate(value, max(error.half_width for error in errors))


def mean_within(sample: Sample, margin: float) -> tuple[Estimate, float]:
    """The mean difference, of two eager runs or more, and how likely one so small is if the truth is at ``margin``."""
    steps = sample.graphed.shape[1]
    value, errors = _weighed(sample, np.full(steps, 1 / steps))
    found = Estimate(value, max(error.half_width for error in errors))
    return found, max(error.p(margin - abs(value)) for error in errors)


def _weighed(sample: Sample, weights: Floats) -> tuple[float, tuple[StandardError, ...]]:
    difference = sample.graphed.mean(axis=0) - sample.eager.mean(axis=0)
    return float(difference @ weights), (_between_repeats(sample, weights), _along_steps(difference, weights))


def _between_repeats(sample: Sample, weights: Floats) -> StandardError:
    groups = [side @ weights for side in (sample.eager, sample.graphed)]
    degrees = sum(len(group) - 1 for group in groups)
    spread = math.hypot(*np.concatenate([group - group.mean() for group in groups]))
    return StandardError(spread * math.sqrt(sum(1 / len(group) for group in groups) / degrees), degrees)


def _along_steps(difference: Floats, weights: Floats) -> StandardError:
    """Of an autoregressive process of order one, with the autocorrelation and variance that ``difference`` has about its
    own line, so that a drift does not count as noise.

    Both are freed of the bias that taking out a line gives them. The first autocorrelation r of n steps is too small by
    about (2 + 4 r) / n (with a mean alone by (1 + 3 r) / n: Kendall 1954, doi:10.1093/biomet/41.3-4.403), and the variance
    by what the line took. It has n (1 - r^2) / (1 + r^2) degrees of freedom, less two.
    """
    steps = len(difference)
    largest = float(np.abs(difference).max())
    if not largest:
        return StandardError(0.0, steps - 2)
    line, relative = _line(steps), difference / largest  # the square of a large difference may overflow
    rest = relative - line.T @ (line @ relative)
    squares = float(rest @ rest)
    if squares <= _ROUNDING**2 * steps:
        return StandardError(0.0, steps - 2)
    first = float(rest[1:] @ rest[:-1]) / squares
    r = min(max((steps * first + 2) / (steps - 4), 0.0), 1 - 1 / steps)
    taken = sum(_variance_factor(part, r) for part in line) / steps
    variance = squares / steps / (1 - min(taken, 0.5))
    degrees = max(1.0, math.floor(10 * (steps * (1 - r**2) / (1 + r**2) - 2)) / 10)
    return StandardError(largest * math.sqrt(variance * _variance_factor(weights, r)), degrees)


@lru_cache(maxsize=16)
def _line(steps: int) -> Floats:
    """Two orthonormal vectors, shape (2, steps), of which every line over the steps is a sum."""
    place = np.arange(steps) - (steps - 1) / 2
    return np.stack([np.full(steps, steps**-0.5), place / np.sqrt(place @ place)])


def _variance_factor(weights: Floats, r: float) -> float:
    """The variance of a weighted sum over that of a step, where steps k apart have the correlation r^k."""
    products = _lagged_products(weights.tobytes())
    return float(products[0] + 2 * (products[1:] @ r ** np.arange(1, len(products))))


@lru_cache(maxsize=16)
def _lagged_products(weights: bytes) -> Floats:
    """Sums over t of w(t) w(t + k), for k from 0 on."""
    values = np.frombuffer(weights)
    spectrum = np.fft.rfft(values, 2 * len(values))
    products: Floats = np.fft.irfft(spectrum * spectrum.conj())[: len(values)]
    return products


def holm(p_values: Sequence[float]) -> tuple[bool, ...]:
    """Which of several tests hold when all count as one (Holm 1979, jstor.org/stable/4615733): the chance that any of
    them is wrong stays at alpha. The smallest p of m is held against alpha / m, the next against alpha / (m - 1)."""
    holds = [False] * len(p_values)
    ascending = sorted(range(len(p_values)), key=lambda place: p_values[place] if p_values[place] <= 1 else math.inf)
    for rank, place in enumerate(ascending):
        if not p_values[place] <= ALPHA / (len(p_values) - rank):
            break
        holds[place] = True
    return tuple(holds)
