"""What attempts before the one to go by came to: a success does not hide a failure before it.

A failure that comes and goes is what a race looks like, in graphs as elsewhere. What infrastructure or the user ended says
nothing, and neither does an attempt on other code, libraries or data: those may have been what was mended.
"""

from __future__ import annotations

import numpy as np

from analysis.records.run import Attempt, Run
from analysis.records.steps import Metric, Steps
from analysis.verdict.curve_difference import METRIC_NAMES, METRICS, bitwise_equal, told_apart
from launch.contract.plan import Margins


def attempts_with_other_bits(run: Run, than: Attempt, margins: Margins | None = None) -> tuple[Attempt, ...]:
    """The whole attempts of ``run`` on what ``than`` ran on, whose curves differ from those of ``than`` in any bit: by more than
    two ``margins`` too, unless they are given."""
    others = [attempt for attempt in (*run.earlier, run.attempt) if attempt and attempt is not than]
    unlike = (other for other in others if _apart(other, than, Margins(0.0, 0.0)))
    return tuple(other for other in unlike if margins is None or not _apart(other, than, margins))


def contradictions(run: Run, margins: Margins) -> tuple[str, ...]:
    """In words, what attempts of ``run`` came to before the one to go by, where that came to something else."""
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
    """How far two attempts with whole records are apart, where it is more than two runs can be that are each within the
    margin of the same eager ones."""
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
    return f"its {METRIC_NAMES[metric]} at step {latest.step[at]} is {first}, not {then} as of"
