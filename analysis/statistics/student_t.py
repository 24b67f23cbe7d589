"""Student's t distribution: tail probabilities and quantiles, for intervals over a handful of repeats.

The distribution function is the regularised incomplete beta function at x = v / (v + t^2), with v degrees of freedom
(Abramowitz and Stegun 26.7.1), computed from its continued fraction (NIST Digital Library of Mathematical Functions, 8.17.22)
by the modified Lentz method.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_TINY = 1e-300
_TERMS = 10_000
_ROUNDING = 1e-15


def upper_tail(t: float, degrees: float) -> float:
    """Return the probability of exceeding ``t`` >= 0. Small probabilities keep their relative accuracy.

    Raises:
        ValueError: ``degrees`` is not a positive finite number, or ``t`` is NaN or negative.
    """
    _check_degrees(degrees)
    if not t >= 0:
        raise ValueError(f"t is {t}, not a number of at least 0")
    if math.isinf(t):
        return 0.0
    square = t * t
    return 0.5 * _incomplete_beta(degrees / (degrees + square), square / (degrees + square), degrees / 2, 0.5)


@lru_cache(maxsize=1024)
def quantile(p: float, degrees: float) -> float:
    """Return the t that is exceeded with probability 1 - ``p``, with a relative error below 1e-9.

    Raises:
        ValueError: ``p`` is not strictly between 0 and 1, or ``degrees`` is not a positive finite number.
    """
    if not 0 < p < 1:
        raise ValueError(f"p is {p}, not a probability between 0 and 1")
    if p < 0.5:
        return -_exceeded_with(p, degrees)
    return _exceeded_with(1 - p, degrees)


def _exceeded_with(tail: float, degrees: float) -> float:
    """Return the t with the probability ``tail``, at most 1/2, above it.

    The tail is convex from 0 on, so Newton's steps from a smaller t never pass the solution. The normal quantile is smaller.
    """
    _check_degrees(degrees)
    t = NormalDist().inv_cdf(1 - tail) if tail > 1e-16 else 0.0
    while (step := (upper_tail(t, degrees) - tail) / _density(t, degrees)) > 1e-13 * t:
        t += step
    return t


def _density(t: float, degrees: float) -> float:
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(math.pi * degrees) / 2
    return math.exp(log_scale - (degrees + 1) / 2 * math.log1p(t * t / degrees))


def _check_degrees(degrees: float) -> None:
    if not (math.isfinite(degrees) and degrees > 0):
        raise ValueError(f"degrees of freedom are {degrees}, not a positive number")


def _incomplete_beta(x: float, y: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b). ``y`` is 1 - ``x`` with all its digits, also for x near 1."""
    if x == 0 or y == 0:
        return 0.0 if x == 0 else 1.0
    # If the fraction converges slowly, its mirror image converges fast.
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(y, x, b, a)
    log_front = a * math.log(x) + b * math.log(y) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front) / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """Return the denominator 1 + d1/(1 + d2/(1 + ...)) of the continued fraction."""
    value = c = 1.0
    d = 0.0
    for term in range(1, _TERMS):
        m, odd = divmod(term, 2)
        if odd:
            coefficient = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            coefficient = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _not_zero(1 + coefficient * d)
        c = _not_zero(1 + coefficient / c)
        value *= c * d
        if abs(c * d - 1) < _ROUNDING:
            return value
    raise ArithmeticError(f"the incomplete beta function at {x} for {a} and {b} does not converge")


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
