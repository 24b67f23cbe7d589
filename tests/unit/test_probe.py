"""The time in which something ran, from intervals that may overlap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launch.probe import union

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))))


@given(INTERVALS)
def test_a_union_counts_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    assert union(intervals) == len({moment for begin, end in intervals for moment in range(begin, end)})
