"""Judge a pair of a user's program by the source of its metrics. Printed digits may hide a difference."""

from __future__ import annotations

from decimal import Decimal

import numpy as np

from analysis.records.run import Attempt
from analysis.records.steps import Floats
from analysis.verdict.curve_difference import METRIC_NAMES, METRICS
from analysis.verdict.verdict import Verdict
from launch.contract.plan import MINIMUM_STEPS, Margins

SOURCES = ("loss", "grad_norm", "steps", "metrics")
"""The observer's records of where a run's steps come from."""
LARGEST_UNIT = 0.1
"""The largest unit of printed digits, as a share of the margin, that still shows differences that matter."""
_EXACT = 1e-7
"""A unit of at most this share of the number is that of float32, so nothing was rounded."""
_FIX = "print the loss and gradient norm with nine digits in JSON lines, or call launch.observe.step(loss=..., grad_norm=...)"


def check_sources(eager: Attempt, graphed: Attempt) -> Verdict | None:
    """Return INCOMPARABLE if the metrics of a pair come from different sources."""
    before, after = ({name: choices.get(name) for name in SOURCES} for choices in map(_choices, (eager, graphed)))
    if differing := [name for name in SOURCES if before.get(name) != after.get(name)]:
        told = "; ".join(f"{name}: {before.get(name)} (eager), {after.get(name)} (graphed)" for name in differing)
        return Verdict("INCOMPARABLE", f"the metrics of the runs come from different sources: {told}", _FIX)
    return None


def check_digits(eager: Attempt, graphed: Attempt, exact: Verdict | None, margins: Margins) -> Verdict | None:
    """Return the verdict on a pair whose metrics were printed, never BITWISE for rounded digits. Else return ``exact``."""
    printed = [
        metric for metric in METRICS if "printed" in (_choices(eager).get(metric), _choices(graphed).get(metric))
    ]
    units = {metric: max(_unit(attempt.steps.of(metric)) for attempt in (eager, graphed)) for metric in printed}
    for metric, unit in units.items():
        sizes = np.abs(eager.steps.of(metric)) if metric == "grad_norm" else np.ones(1)
        relative = unit / float(np.median(sizes)) if np.median(sizes) > 0 else 0.0
        if relative > LARGEST_UNIT * margins.of(metric):
            reason = (
                f"the {METRIC_NAMES[metric]} is printed in units of {unit:.1g}, too coarse for its margin of "
                f"{margins.of(metric):g}"
            )
            return Verdict("INCONCLUSIVE", reason, _FIX)
    return not_of_bits(exact) if exact and any(units.values()) else exact


def not_of_bits(verdict: Verdict) -> Verdict:
    """Return ``verdict``, or a weaker one instead of BITWISE, because the numbers may be rounded."""
    if verdict.verdict != "BITWISE":
        return verdict
    reason = "all printed digits are equal, but printed digits do not show equal bits"
    if verdict.evidence and verdict.evidence.steps >= MINIMUM_STEPS:
        return Verdict("EQUIVALENT", reason, evidence=verdict.evidence)
    return Verdict("INCONCLUSIVE", reason, "train for more steps", verdict.evidence)


def _choices(attempt: Attempt) -> dict[str, str]:
    choices = attempt.environment.get("choices")
    return dict(choices) if isinstance(choices, dict) else {}


def _unit(values: Floats) -> float:
    """Return the unit of the last printed digit, or 0 if numbers have all digits of float32."""
    finite = values[np.isfinite(values) & (values != 0)]
    units = np.array([10.0 ** int(Decimal(repr(float(value))).as_tuple().exponent) for value in finite])
    return 0.0 if not len(units) or np.median(units / np.abs(finite)) <= _EXACT else float(np.median(units))
