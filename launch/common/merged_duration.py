"""Measure how long at least one of several intervals lasts."""

from __future__ import annotations

from collections.abc import Iterable


def merged_duration(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of ``intervals`` (start, end). One that ends before it starts counts nothing."""
    covered = end = 0
    for begins, ends in sorted(intervals):
        covered += max(0, ends - max(begins, end))
        end = max(end, ends)
    return covered
