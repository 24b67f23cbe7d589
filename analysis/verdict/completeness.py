"""Rung 0 of a verdict: check that both sides have every step once, in order and finite, and begin alike.

The keys of ``Curves`` are the names that messages use, such as "eager run" or a file name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from analysis.records.steps import Booleans, Floats, Integers, Steps
from analysis.verdict.curve_difference import METRIC_NAMES, Deviation, sample_of
from analysis.verdict.curve_tests.divergence import SURE
from analysis.verdict.verdict import Verdict
from launch.common.text import numbered
from launch.contract.plan import Margins
from launch.contract.records.step_metrics import METRICS, Metric

Curves = Mapping[str, Steps]

AHEAD = 10
"""How many later steps show the noise of a step before the capture too."""
_AGAIN = "run the pair again, since the comparison needs every step of both runs"
_TRAIN = "make eager training stable first: lower the learning rate, or change the data"


def check_complete(
    eager: Curves, graphed: Curves, expected: Integers, first: int, metrics: Sequence[Metric]
) -> Verdict | None:
    """Return INCOMPARABLE if the curves cannot be compared from ``expected[first]`` on, else None.

    First check for a number that is not finite only in graphed runs, because a run that stopped at a NaN also lacks steps.
    """
    curves = {**eager, **graphed}
    shared = shared_steps(list(curves.values()), expected)
    one_sided = _one_sided(eager, graphed, expected, first, shared, metrics) if shared > first else None
    if one_sided:
        return one_sided
    gaps = [
        next((f"{name}: {gap}" for name, steps in side.items() if (gap := incomplete(steps, expected))), "")
        for side in (eager, graphed)
    ]
    if (gap := "; ".join(filter(None, gaps))) and not (
        shared > first and _ended_together(list(curves.values()), shared, metrics)
    ):
        return Verdict("INCOMPARABLE", gap, _AGAIN)
    if shared <= first:
        return Verdict("INCOMPARABLE", "no step ran after the capture", "train for more steps")
    return _not_finite(curves, expected, first, shared, metrics)


def incomplete(steps: Steps, expected: Integers) -> str:
    """Describe how the step numbers of ``steps`` differ from the ``expected`` ones; return "" if they are equal."""
    if np.array_equal(steps.step, expected):
        return ""
    recorded = steps.step.tolist()
    missing = sorted(set(expected.tolist()) - set(recorded))
    unexpected = sorted(set(recorded) - set(expected.tolist()))
    duplicates = sorted(step for step, count in Counter(recorded).items() if count > 1)
    parts = [f"{numbered('step', missing, 5)} missing of {len(expected)}" if missing else ""]
    parts += [f"{numbered('step', unexpected, 5)} not expected (steps are {_span(expected)})" if unexpected else ""]
    parts += [f"{numbered('step', duplicates, 5)} recorded more than once" if duplicates else ""]
    return "; ".join(part for part in parts if part) or "steps are out of order"


def _span(expected: Integers) -> str:
    return f"{expected[0]} to {expected[-1]}" if len(expected) else "none"


def shared_steps(curves: Sequence[Steps], expected: Integers) -> int:
    """Count the leading ``expected`` steps that all ``curves`` have, in place."""
    length = min(len(expected), *(len(steps) for steps in curves))
    in_place = np.all([steps.step[:length] == expected[:length] for steps in curves], axis=0)
    return length if in_place.all() else int(np.argmin(in_place))


def finite_steps(steps: Steps, metrics: Sequence[Metric] = METRICS) -> Booleans:
    """Return at which steps all ``metrics`` are finite, shape (steps,)."""
    finite: Booleans = np.all([np.isfinite(steps.of(metric)) for metric in metrics], axis=0)
    return finite


def _one_sided(
    eager: Curves, graphed: Curves, expected: Integers, first: int, shared: int, metrics: Sequence[Metric]
) -> Verdict | None:
    """Return DIVERGED at the first number after the capture that is not finite in a graphed run, but in all eager runs.

    If an eager run is not finite either, graphs need not be the cause.
    """
    deviations = []
    for metric in metrics:
        before, after = (
            np.stack([np.isfinite(steps.of(metric)[first:shared]) for steps in side.values()])
            for side in (eager, graphed)
        )
        differs = ~after.all(axis=0) & before.all(axis=0)
        if differs.any():
            deviations.append((first + int(np.argmax(differs)), metric))
    if not deviations:
        return None
    at, metric = min(deviations, key=lambda item: item[0])
    values = [_value_at(side, metric, at) for side in (graphed, eager)]
    reason = f"first at step {expected[at]}: the {METRIC_NAMES[metric]} is {values[0]} graphed and {values[1]} eager"
    return Verdict("DIVERGED", reason, deviation=Deviation(int(expected[at]), metric, float("inf")))


def eager_fault(eager: Sequence[Steps]) -> Verdict | None:
    """Return INCOMPARABLE if a number of an eager run is not finite. Graphs need not be the cause then."""
    for steps in eager:
        finite = finite_steps(steps)
        if not finite.all():
            at = int(steps.step[np.argmin(finite)])
            reason = f"the loss or gradient norm of an eager run is not finite at step {at}, so nothing can be compared"
            return Verdict("INCOMPARABLE", reason, _TRAIN)
    return None


def _value_at(side: Curves, metric: Metric, at: int) -> str:
    """Format the first value at index ``at`` that is not finite, else the value of the first run."""
    values = [float(steps.of(metric)[at]) for steps in side.values()]
    return f"{next((value for value in values if not np.isfinite(value)), values[0]):.9g}"


def _ended_together(curves: Sequence[Steps], shared: int, metrics: Sequence[Metric]) -> bool:
    """Return whether all runs end at the same step with a number that is not finite, so that no step is missing."""
    return all(len(steps) == shared and not finite_steps(steps, metrics)[-1] for steps in curves)


def _not_finite(
    curves: Curves, expected: Integers, first: int, shared: int, metrics: Sequence[Metric]
) -> Verdict | None:
    """Return INCOMPARABLE for any other number that is not finite: on both sides, before the capture, or in one of several eager runs."""
    finite = {name: finite_steps(steps, metrics)[:shared] for name, steps in curves.items()}
    bad = {name: int(np.argmin(values)) for name, values in finite.items() if not values.all()}
    if not bad:
        return None
    name = min(bad, key=lambda name: bad[name])
    at = bad[name]
    everywhere = all(not values[at] for values in finite.values())
    where = "on both sides" if everywhere else name
    when = "" if at >= first else ", before the capture"
    reason = (
        f"the loss or gradient norm is not finite at step {expected[at]} ({where}{when}), so nothing can be compared"
    )
    return Verdict("INCOMPARABLE", reason, _TRAIN)


def check_agreement(
    eager: Sequence[Steps],
    graphed: Sequence[Steps],
    first: int,
    margins: Margins,
    metrics: Sequence[Metric] = METRICS,
    *,
    equal: bool,
) -> Verdict | None:
    """Return INCOMPARABLE if ``graphed`` differ from the ``eager`` runs before index ``first`` by more than margin and noise.

    Graphed runs are eager there. ``equal`` is whether all are equal bit for bit from ``first`` on: then there is no noise.
    """
    found = describe_disagreement(eager, graphed, range(first), margins, metrics, equal=equal)
    if not found:
        return None
    reason = (
        f"the graphed run differs from the eager runs before its capture: {found}, where both run eagerly, so graphs are not the "
        "cause"
    )
    return Verdict("INCOMPARABLE", reason, "check that both started with the same weights, data and settings")


def describe_disagreement(
    eager: Sequence[Steps],
    graphed: Sequence[Steps],
    places: range,
    margins: Margins,
    metrics: Sequence[Metric] = METRICS,
    *,
    equal: bool,
) -> str:
    """Describe the largest difference at the indices ``places`` that exceeds margin and noise; return "" without one.

    ``equal`` is whether all runs are equal bit for bit afterwards: then there is no noise, and one eager run suffices.
    """
    if not places or (len(eager) < 2 and not equal):
        return ""
    for metric in metrics:
        size = sample_of(metric, eager, graphed, slice(places.stop)).largest
        limit = margins.of(metric) + SURE * _noise_before(metric, eager, places.stop)
        excess = np.where(np.isnan(size), np.inf, size - limit)
        at = places.start + int(np.argmax(excess[places.start :]))
        if excess[at] > 0:
            return f"the {METRIC_NAMES[metric]} differs by {size[at]:.3g} at step {eager[0].step[at]}"
    return ""


def _noise_before(metric: Metric, eager: Sequence[Steps], first: int) -> Floats:
    """Return the noise of ``eager`` runs at each step before index ``first``, shape (first,).

    There is none until the runs first differ. From there on it is their largest difference up to ``AHEAD`` steps later. The few
    steps before the capture show too little: with two eager runs, equal code exceeded three times their difference in up to 9% of
    simulated pairs, by the profile of the noise, and in at most 0.2% with these steps. Noise that grows until the end of
    training would hide other weights or data at the start.
    """
    if len(eager) < 2:
        return np.zeros(first)
    shared = min(first + AHEAD, *map(len, eager))
    distances = np.abs(sample_of(metric, eager, eager, slice(shared)).eager_distances).max(axis=0)
    begun = np.maximum.accumulate(distances[:first] > 0)
    largest = np.maximum.accumulate(np.where(np.isfinite(distances), distances, 0.0))
    noise: Floats = np.where(begun, largest[np.minimum(np.arange(first) + AHEAD, shared - 1)], 0.0)
    return noise
