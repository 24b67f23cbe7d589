"""Test that the pairwise cover includes every pair that can occur."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import cover, covering, each_once, pairs


@given(st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[st.integers(0, 3)] * width), min_size=1)))
def test_a_cover_holds_every_pair_of_values_that_any_case_holds(cases: list[tuple[int, ...]]) -> None:
    chosen = [cases[number] for number in cover(cases)]
    assert {pair for case in chosen for pair in pairs(case)} == {pair for case in cases for pair in pairs(case)}


def test_a_cover_is_small_and_takes_what_comes_first() -> None:
    cases = list(product(range(3), repeat=6))
    chosen = cover(cases)
    assert len(chosen) <= 20 < len(cases), "9 is the least for three values"
    assert chosen[0] == 0 and chosen == cover(cases)


def test_cases_beyond_the_choice_have_the_mark() -> None:
    mark = pytest.mark.skip
    axes = ("abcd", "xy", "01")
    kept = [case.values for case in covering(mark, *axes) if not case.marks]
    assert {pair for case in kept for pair in pairs(case)} == {pair for case in product(*axes) for pair in pairs(case)}
    assert len(kept) == 8 < len(covering(mark, *axes)) == 16
    assert [case.values for case in each_once(mark, "abcd", "xyz") if not case.marks] == [
        ("a", "x"), ("b", "y"), ("c", "z"), ("d", "x"),
    ]  # fmt: skip
