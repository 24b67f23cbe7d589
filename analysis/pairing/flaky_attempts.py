"""Find earlier attempts of a run that contradict the last one: a success must not hide an earlier failure.

Race conditions cause intermittent failures. Attempts ended by infrastructure or the user do not count. Attempts with
different code, libraries or data do not count either, since that difference may be the cause.
"""

from __future__ import annotations

import numpy as np

from analysis.records.run import Attempt, Run
from analysis.records.steps import Metric, Steps
from analysis.verdict.curve_difference import METRIC_NAMES, METRICS, bitwise_equal, told_apart
from launch.contract.plan import Margins


def attempts_with_other_bits(run: Run, than: Attempt, margins: Margins | None = None) -> tuple[Attempt, ...]:
    """Return the complete attempts of ``run`` with the digests of ``than``, but curves that differ from its in some bit.

    With ``margins``, exclude attempts that differ by more than twice a margin.
    """
    others = [attempt for attempt in (*run.earlier, run.attempt) if attempt and attempt is not than]
    unequal = (other for other in others if _describe_difference(other, than, Margins(0.0, 0.0)))
    return tuple(other for other in unequal if margins is None or not _describe_difference(other, than, margins))


def contradictions(run: Run, margins: Margins) -> tuple[str, ...]:
    """Describe the earlier attempts of ``run`` with a different outcome, or a different curve, than the last attempt."""
    latest = run.attempt
    if latest is None:
        return ()
    descriptions = {
        failed.number: f"ended {failed.outcome.outcome} in {failed.outcome.phase}, attempt {latest.number} {latest.outcome.outcome}"
        for failed in run.failed
        if failed.outcome.outcome != latest.outcome.outcome
    }
    for earlier in run.earlier:
        difference = _describe_difference(earlier, latest, margins)
        if difference:
            descriptions[earlier.number] = f"ended {earlier.outcome.outcome}, but {difference} attempt {latest.number}"
    return tuple(f"attempt {number} {descriptions[number]}" for number in sorted(descriptions))


def _describe_difference(earlier: Attempt, latest: Attempt, margins: Margins) -> str:
    """Describe how two complete attempts differ by more than twice a margin; return "" if they do not.

    If they differ by less, both may be within one margin of the eager baseline.
    """
    intact = earlier.outcome.results_intact and latest.outcome.results_intact
    if not intact or earlier.problems or latest.problems or earlier.digests != latest.digests:
        return ""
    if not np.array_equal(earlier.steps.step, latest.steps.step):
        return ""
    descriptions = (_largest(metric, earlier.steps, latest.steps, margins) for metric in METRICS)
    return next((description for description in descriptions if description), "")


def _largest(metric: Metric, earlier: Steps, latest: Steps, margins: Margins) -> str | None:
    """Describe the largest difference of ``metric``, or return None if it is at most twice the margin."""
    before, after = earlier.of(metric), latest.of(metric)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        difference = np.abs(before - after) / (1.0 if metric == "loss" else np.abs(after))
    difference = np.where(bitwise_equal(before, after), 0.0, np.where(np.isfinite(difference), difference, np.inf))
    at = int(np.argmax(difference)) if len(difference) else 0
    if not len(difference) or difference[at] <= 2 * margins.of(metric):
        return None
    values = told_apart(float(before[at]), float(after[at]))
    return f"its {METRIC_NAMES[metric]} at step {latest.step[at]} is {values[0]}, and {values[1]} in"
