"""A cover of options pair by pair: few cases in which every two options meet in every way that is allowed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

import numpy as np

Pair = tuple[int, Hashable, int, Hashable]


def pairs(case: Sequence[Hashable]) -> list[Pair]:
    """The values of every two options of ``case``, each with its option's number."""
    return [(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)]


def cover(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Numbers of cases that hold every pair of values that any of ``cases`` holds.

    Greedy: the next one holds most pairs that are not held yet, and of equals comes first, so that cheap cases are best
    put first.
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
