"""Standard errors of small samples whose variances need not be equal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from analysis.statistics.student_t import quantile, upper_tail


@dataclass(frozen=True)
class Variance:
    """An estimated variance, and the degrees of freedom of its estimate (1 or more)."""

    size: float
    degrees: float

    def __mul__(self, factor: float) -> Variance:
        """Return the variance times ``factor``, with the same degrees of freedom."""
        return Variance(self.size * factor, self.degrees)


@dataclass(frozen=True)
class StandardError:
    """The standard error of an estimate, and its degrees of freedom (1 or more)."""

    size: float
    degrees: float

    def exceeded_with(self, probability: float) -> float:
        """Return the distance from the true value that the estimate exceeds with ``probability``, in one direction."""
        if not self.size > 0:
            return 0.0
        # Round degrees down, by 2% at most, so that few distinct quantiles are computed and cached.
        unit = 10.0 ** (math.floor(math.log10(self.degrees)) - 1) / 5
        return quantile(1 - probability, math.floor(self.degrees / unit + 1e-9) * unit) * self.size

    def p(self, distance: float) -> float:
        """Return the one-sided p-value of an estimate at ``distance`` inside the margin.

        The null hypothesis is that the true value is at the margin. Return 1 at or outside the margin, and if a number is not
        finite.
        """
        if not (math.isfinite(distance) and math.isfinite(self.size)) or distance <= 0:
            return 1.0
        return upper_tail(distance / self.size, self.degrees) if self.size > 0 else 0.0


def welch(*variances: Variance) -> StandardError:
    """Return the standard error of a sum of independent estimates (Welch 1947, doi:10.1093/biomet/34.1-2.28).

    The degrees of freedom are Satterthwaite's: a group without variance adds none. A pooled variance would count the degrees of
    such a group, and claim an accuracy that the other group does not have.
    """
    total = sum(one.size for one in variances)
    if not total > 0 or not math.isfinite(total):
        return StandardError(math.sqrt(total) if total >= 0 else math.nan, max(one.degrees for one in variances))
    # Divide first: the square of a large variance can overflow.
    degrees = 1 / sum((one.size / total) ** 2 / one.degrees for one in variances)
    return StandardError(math.sqrt(total), degrees)
