"""Find attempts that contradict the one that counts. A success must not hide a failure of another attempt.

Race conditions cause intermittent failures. A user may cancel an attempt that diverges, or its node may fail. So every attempt
with steps after the capture is compared, however it ended. Attempts with other code, libraries or data are only named, because
that difference may be the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.pairing.step_checks import fault_of
from analysis.records.run import Attempt, Digests, PartialAttempt, Run
from analysis.records.steps import Steps
from analysis.verdict.curve_difference import METRIC_NAMES, bitwise_equal, format_unequal, sample_of
from analysis.verdict.judge_curves import first_compared
from launch.contract.plan import Margins
from launch.contract.records.step_metrics import METRICS, Metric

OtherAttempt = Attempt | PartialAttempt
"""An attempt other than the one that counts."""


def contradictions(run: Run, eager: Sequence[Steps], margins: Margins, first: int | None = None) -> dict[int, str]:
    """Describe, by number, the attempts of ``run`` whose outcome differs from the one that counts, or whose curve deviates.

    ``eager``, ``margins`` and ``first`` are arguments of :func:`deviations`.
    """
    latest = run.attempt
    if latest is None:
        return {}
    others = {
        number: f"attempt {number} ended {outcome.outcome} in {outcome.phase}, but attempt {latest.number} ended "
        f"{latest.outcome.outcome}"
        for number, outcome in run.failed.items()
        if outcome.outcome != latest.outcome.outcome
    }
    others |= deviations(comparable_attempts(run, latest, latest.digests), eager, margins, first)
    return {number: others[number] for number in sorted(others)}


def comparable_attempts(run: Run, than: Attempt | None, digests: Digests) -> list[OtherAttempt]:
    """Return the attempts of ``run``, except ``than``, with sound records and the same digests, if they have any."""
    sound = (other for other in _others(run, than) if not other.problems and _is_in_order(other.steps))
    return [other for other in sound if other.digests in (digests, ())]


def deviations(
    others: Sequence[OtherAttempt], eager: Sequence[Steps], margins: Margins, first: int | None = None
) -> dict[int, str]:
    """Describe, by number, each of ``others`` with a fault in a step check, or with a curve that leaves the margins.

    Margins are around the mean of the complete ``eager`` curves. Curves are compared from index ``first`` on; None means the
    first step after each attempt's own capture.
    """
    found = {other.number: fault_of(other) or _deviation(other.steps, eager, margins, first) for other in others}
    endings = {other.number: other.ending for other in others}
    return {n: f"attempt {n} {endings[n]}, but {deviation}" for n, deviation in found.items() if deviation}


def has_other_bits(steps: Steps, than: Steps, first: int) -> bool:
    """Return whether two curves differ in some bit from index ``first`` to the end of the shorter one."""
    window = slice(first, min(len(steps), len(than)))
    return not all(bitwise_equal(steps.of(metric)[window], than.of(metric)[window]).all() for metric in METRICS)


def uncompared_attempts(run: Run) -> list[str]:
    """Describe the attempts of ``run`` that cannot be compared, or may have failed: they have no outcome."""
    if run.attempt is None:
        return []
    others = _others(run, run.attempt)
    return [f"attempt {one.number} {one.ending} and {why}" for one in others if (why := _reason(one, run.attempt))]


def _reason(other: OtherAttempt, counts: Attempt) -> str:
    if other.problems:
        return f"is not compared: {'; '.join(other.problems)}"
    if other.outcome is None:
        return "may have failed: it did not end, or its outcome is lost, so only its steps are compared"
    if not len(other.steps) or other.digests == ():
        return ""
    if counts.digests == ():
        return "is not compared: the attempt that counts did not record its code, data and libraries"
    names = sorted({name for name, _ in {*other.digests} ^ {*counts.digests}})
    if names:
        return f"is not compared: it ran with other {', '.join(names)}"
    return "" if _is_in_order(other.steps) else "is not compared: its steps are not in order"


def _others(run: Run, than: Attempt | None) -> list[OtherAttempt]:
    whole = (one for one in run.whole if one is not than)
    return sorted((*whole, *run.partial), key=lambda one: one.number)


def _is_in_order(steps: Steps) -> bool:
    return np.array_equal(steps.step, np.arange(len(steps)))


def _deviation(steps: Steps, eager: Sequence[Steps], margins: Margins, first: int | None) -> str:
    """Describe the largest difference of ``steps`` from the mean of ``eager``; return "" if none exceeds its margin."""
    begin = first_compared(steps.phase) if first is None else first
    end = min(len(curve) for curve in (steps, *eager)) if eager else 0
    if begin is None or begin >= end:
        return ""
    descriptions = (_largest(metric, steps, eager, slice(begin, end), margins) for metric in METRICS)
    return next((description for description in descriptions if description), "")


def _largest(metric: Metric, steps: Steps, eager: Sequence[Steps], window: slice, margins: Margins) -> str:
    difference = sample_of(metric, eager, [steps], window).largest
    at = int(np.argmax(difference))
    if difference[at] <= margins.of(metric):
        return ""
    values = format_unequal(*(float(curve.of(metric)[window][at]) for curve in (steps, eager[0])))
    return f"its {METRIC_NAMES[metric]} at step {steps.step[window][at]} is {values[0]} ({values[1]} eager)"
