"""Correct the verdicts of a sweep for multiple tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from analysis.verdict.curve_tests.equivalence_test import ALPHA
from analysis.verdict.verdict import REPEAT, Verdict


def judge_family(verdicts: Sequence[Verdict], elsewhere: int = 0) -> tuple[Verdict, ...]:
    """Return the corrected verdicts of all cells of a sweep.

    Their tests count as one family: the probability of one or more wrong EQUIVALENT verdicts is at most alpha.
    ``elsewhere`` is the number of the sweep's other cells. A verdict holds whatever the tests of those cells show.
    """
    tested = [place for place, verdict in enumerate(verdicts) if verdict.evidence and verdict.evidence.tested]
    p_values = [*(verdicts[place].p for place in tested), *[1.0] * elsewhere]
    holds = dict(zip(tested, holm(p_values), strict=False))
    return tuple(
        # Equal printed digits pass without a test.
        verdict if verdict.verdict != "EQUIVALENT" or holds.get(place, True) else _uncertain(verdict, len(p_values))
        for place, verdict in enumerate(verdicts)
    )


def _uncertain(verdict: Verdict, tests: int) -> Verdict:
    reason = f"within the margins on its own (p {verdict.p:.2g}), but not certain enough among {tests} tested cells"
    return Verdict("INCONCLUSIVE", reason, "", verdict.evidence, noisy=True, alternatives=REPEAT)


def holm(p_values: Sequence[float]) -> tuple[bool, ...]:
    """Return which of several tests reject with Holm's correction (Holm 1979, jstor.org/stable/4615733).

    The family-wise error rate stays at alpha. The smallest of m p-values must be at most alpha / m, the next at most
    alpha / (m - 1), and so on.
    """
    holds = [False] * len(p_values)
    ascending = sorted(range(len(p_values)), key=lambda place: p_values[place] if p_values[place] <= 1 else math.inf)
    for rank, place in enumerate(ascending):
        if not p_values[place] <= ALPHA / (len(p_values) - rank):
            break
        holds[place] = True
    return tuple(holds)
