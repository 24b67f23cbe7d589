"""Earlier attempts of a run that contradict the last one: a success does not hide an earlier failure.

Races look like failures that come and go. Attempts that infrastructure or the user ended do not count, nor do attempts with
other code, libraries or data, which may have been the cause.
"""

from __future__ import annotations

import numpy as np

from analysis.records.run import Attempt, Run
from analysis.records.steps import Metric, Steps
from analysis.verdict.curve_difference import METRIC_NAMES, METRICS, bitwise_equal, told_apart
from launch.contract.plan import Margins


def attempts_with_other_bits(run: Run, than: Attempt, margins: Margins | None = None) -> tuple[Attempt, ...]:
    """Return the complete attempts of ``run`` with the digests of ``than`` whose curves differ from its in any bit.

    With ``margins``, leave out those that differ by more than twice these.
    """
    others = [attempt for attempt in (*run.earlier, run.attempt) if attempt and attempt is not than]
    unlike = (other for other in others if _apart(other, than, Margins(0.0, 0.0)))
    return tuple(other for other in unlike if margins is None or not _apart(other, than, margins))


def contradictions(run: Run, margins: Margins) -> tuple[str, ...]:
    """Describe the earlier attempts of ``run`` that ended otherwise than the last one, or with another curve."""
    latest = run.attempt
    if latest is None:
        return ()
    said = {
        failed.number: f"ended {failed.outcome.outcome} in {failed.outcome.phase}, attempt {latest.number} {latest.outcome.outcome}"
        for failed in run.failed
        if failed.outcome.outcome != latest.outcome.outcome
    }
    for earlier in run.earlier:
        apart = _apart(earlier, latest, margins)
        if apart:
            said[earlier.number] = f"ended {earlier.outcome.outcome}, but {apart} attempt {latest.number}"
    return tuple(f"attempt {number} {said[number]}" for number in sorted(said))


def _apart(earlier: Attempt, latest: Attempt, margins: Margins) -> str:
    """Describe how two complete attempts differ by more than twice a margin: by less, both may be within it of eager."""
    intact = earlier.outcome.results_intact and latest.outcome.results_intact
    if not intact or earlier.problems or latest.problems or earlier.digests != latest.digests:
        return ""
    if not np.array_equal(earlier.steps.step, latest.steps.step):
        return ""
    found = (_largest(metric, earlier.steps, latest.steps, margins) for metric in METRICS)
    return next((words for words in found if words), "")


def _largest(metric: Metric, earlier: Steps, latest: Steps, margins: Margins) -> str | None:
    before, after = earlier.of(metric), latest.of(metric)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        difference = np.abs(before - after) / (1.0 if metric == "loss" else np.abs(after))
    difference = np.where(bitwise_equal(before, after), 0.0, np.where(np.isfinite(difference), difference, np.inf))
    at = int(np.argmax(difference)) if len(difference) else 0
    if not len(difference) or difference[at] <= 2 * margins.of(metric):
        return None
    first, then = told_apart(float(before[at]), float(after[at]))
    return f"its {METRIC_NAMES[metric]} at step {latest.step[at]} is {first}, and {then} in"
