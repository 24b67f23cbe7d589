"""Compare Student's t with its tables, its closed forms and its own inverse."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.statistics.student_t import quantile, upper_tail

DEGREES = st.one_of(st.integers(1, 2000), st.floats(0.5, 500))


@pytest.mark.parametrize(
    ("p", "degrees", "expected"),
    [  # Computed with 50 digits (mpmath). They round to the printed tables.
        (0.975, 1, 12.706204736174705),
        (0.975, 2, 4.3026527297494639),
        (0.975, 3, 3.1824463052837096),
        (0.975, 4, 2.776445105197793),
        (0.975, 9, 2.262157162798205),
        (0.975, 29, 2.045229642132703),
        (0.95, 1, 6.313751514675040),
        (0.95, 5, 2.015048373333023),
        (0.95, 99, 1.6603911560169909),
        (0.995, 10, 3.1692726726169512),
        (0.9995, 7, 5.407882520861723),
        (0.6, 3, 0.276670662332690),
    ],
)
def test_quantiles_are_those_of_the_tables(p: float, degrees: int, expected: float) -> None:
    assert quantile(p, degrees) == pytest.approx(expected, rel=1e-9)
    assert quantile(1 - p, degrees) == pytest.approx(-expected, rel=1e-9)


@given(st.floats(1e-6, 1 - 1e-6))
def test_one_and_two_degrees_have_a_closed_form(p: float) -> None:
    cauchy, two = math.tan(math.pi * (p - 0.5)), (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    assert quantile(p, 1) == pytest.approx(cauchy, rel=1e-7, abs=1e-9)
    assert quantile(p, 2) == pytest.approx(two, rel=1e-7, abs=1e-9)


@given(st.floats(1e-5, 1 - 1e-5), DEGREES)
def test_the_quantile_is_the_inverse_of_the_distribution(p: float, degrees: float) -> None:
    """Both sides of the middle are tested. One is the mirror image of the other."""
    t = quantile(p, degrees)
    assert (t < 0) == (p < 0.5)
    assert upper_tail(abs(t), degrees) == pytest.approx(min(p, 1 - p), rel=1e-8)


@given(st.floats(0, 50), st.floats(0, 50), DEGREES)
def test_the_tail_falls(one: float, other: float, degrees: float) -> None:
    low, high = sorted((one, other))
    assert upper_tail(high, degrees) <= upper_tail(low, degrees) * (1 + 1e-12)


def test_many_degrees_are_the_normal_distribution() -> None:
    assert quantile(0.975, 1e7) == pytest.approx(NormalDist().inv_cdf(0.975), rel=1e-6)


def test_ends() -> None:
    assert (quantile(0.5, 3), upper_tail(0.0, 3), upper_tail(math.inf, 3)) == (0.0, 0.5, 0.0)


@pytest.mark.parametrize(("p", "degrees"), [(0.0, 3), (1.0, 3), (math.nan, 3), (0.9, 0), (0.9, math.inf), (0.9, -1)])
def test_what_has_no_quantile_is_refused(p: float, degrees: float) -> None:
    with pytest.raises(ValueError, match=r"p is|degrees of freedom are"):
        quantile(p, degrees)


def test_a_statistic_that_is_no_number_is_refused() -> None:
    for statistic in (math.nan, -1.0):
        with pytest.raises(ValueError, match="not a number of at least 0"):
            upper_tail(statistic, 3)
