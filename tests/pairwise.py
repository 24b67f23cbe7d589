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
    number: dict[Pair, int] = {}
    held = np.array([[number.setdefault(pair, len(number)) for pair in pairs(case)] for case in cases], int)
    missing = np.ones(len(number), bool)
    chosen = []
    while missing.any():
        best = int(missing[held].sum(1).argmax())
        missing[held[best]] = False
        chosen.append(best)
    return chosen
