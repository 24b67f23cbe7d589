"""Select few cases that hold every pair of option values (pairwise testing)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

Pair = tuple[int, Hashable, int, Hashable]


def pairs(case: Sequence[Hashable]) -> list[Pair]:
    """Return the values of every two options of ``case``, each with its option's number."""
    return [(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)]


def cover(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return the indices of cases that contain every pair of values found in any of ``cases``.

    The choice is greedy: take the case with the most missing pairs. Of equal cases, take the first. So put cheap cases
    first.
    """
    numbers = [
        {value: number for number, value in enumerate(dict.fromkeys(column))} for column in zip(*cases, strict=True)
    ]
    codes = np.array([[known[value] for known, value in zip(numbers, case, strict=True)] for case in cases])
    most = max(map(len, numbers))
    columns = [
        (place * most + codes[:, i]) * most + codes[:, j]
        for place, (i, j) in enumerate(combinations(range(len(numbers)), 2))
    ]
    held = np.stack(columns, axis=1) if columns else np.empty((len(cases), 0), int)
    missing = np.zeros(len(columns) * most * most, bool)
    missing[held] = True
    chosen = []
    while missing.any():
        best = int(missing[held].sum(1).argmax())
        missing[held[best]] = False
        chosen.append(best)
    return chosen


def covering(beyond: pytest.MarkDecorator, *axes: Collection[Hashable]) -> list[Any]:
    """Return all combinations of values as cases of pytest. Those that a cover of all pairs does without have the mark ``beyond``."""
    cases = list(product(*axes))
    return _marked(cases, set(cover(cases)), beyond)


def each_once(beyond: pytest.MarkDecorator, one: Collection[Hashable], other: Collection[Hashable]) -> list[Any]:
    """Return all pairs of values as cases of pytest. Those have the mark ``beyond`` without which each value is in some case."""
    cases, longest = list(product(one, other)), max(len(one), len(other))
    chosen = {place % len(one) * len(other) + place % len(other) for place in range(longest)}
    return _marked(cases, chosen, beyond)


def _marked(cases: Sequence[Sequence[Hashable]], chosen: Collection[int], beyond: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(*case, marks=() if place in chosen else beyond) for place, case in enumerate(cases)]
