"""Compare the gradients of the first replayed steps with those of eager runs, parameter by parameter.

Both runs took the same steps up to the capture. So a replay that computes something else shows at once, in the affected
parameters, and long before it shows in a curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from analysis.records.run import Attempt
from analysis.verdict.verdict import Verdict
from launch.common.text import listed
from launch.contract.records.gradient_sketch import GradientSketch

NOISE_MULTIPLE = 6.0
"""A fault exceeds this multiple of the noise, as in step checks. The noise is the larger of two differences: between eager runs,
and at the step before the capture."""
LEAST_OF_ITSELF, LEAST_OF_ALL = 1 / 16, 1 / 50
"""A fault exceeds the first share of its gradient's norm and the second share of the norm of all gradients.

Rounding of other kernels stays below the first share.
"""
LEAST_NORM = 1 / 5000
"""A smaller difference is a doubt if the gradient's norm exceeds this share of the norm of all gradients.

Losses hardly depend on such a parameter, so their curves agree even if the replay is wrong. Gradients that are mere rounding
errors, such as that of a key's bias, have smaller norms.
"""
MOST_NAMED = 3
FIRST_REPLAYS = 3

_Place = tuple[int, str]
"""A rank, and the name of a parameter."""
_Gradients = Mapping[_Place, GradientSketch]


def check_first_replay(eager: Attempt, graphed: Attempt, others: Sequence[Attempt], captured: int) -> Verdict | None:
    """Return DIVERGED if a gradient in the first steps after step ``captured`` differs from eager runs, INCONCLUSIVE if only
    small gradients differ, else None.

    Return None without a second eager run in ``others``, or if the runs already differ before the capture.
    """
    repeats = [attempt for attempt in (eager, *others) if attempt.sketches]
    if len(repeats) < 2 or not graphed.sketches:
        return None
    steps = sorted(step for step in graphed.sketches if all(step in attempt.sketches for attempt in repeats))
    before = [step for step in steps if step < captured][-1:]
    if before and _faults(repeats, graphed, before[0], {}):
        return None
    scale = _distances(eager.sketches[before[0]], graphed.sketches[before[0]]) if before else {}
    replays = [step for step in steps if step > captured][:FIRST_REPLAYS]
    for step in replays:
        if found := _faults(repeats, graphed, step, scale):
            reason = f"graphed runs compute other gradients in step {step}, although eager runs agree: {_named(found)}"
            return Verdict(
                "DIVERGED",
                reason,
                "make sure that both commands differ in graphs alone; then capture fewer parts until the gradients are equal",
            )
    for step in replays:
        if found := _faults(repeats, graphed, step, scale, is_small=True):
            reason = (
                f"small gradients differ in step {step}, although eager runs agree: {_named(found)}. Losses and gradient "
                "norms hardly depend on them, so agreeing curves prove little"
            )
            return Verdict(
                "INCONCLUSIVE",
                reason,
                "find out whether graphs run other kernels there, such as another attention backend; otherwise capture fewer "
                "parts until the gradients are equal",
            )
    return None


def _named(found: Sequence[tuple[_Place, float]]) -> str:
    gradients = [f"{name} on rank {rank} by {share:.2g} of it" for (rank, name), share in found]
    return listed(gradients, MOST_NAMED, "; ")


def _faults(
    repeats: Sequence[Attempt],
    graphed: Attempt,
    step: int,
    scale: Mapping[_Place, float],
    *,
    is_small: bool = False,
) -> list[tuple[_Place, float]]:
    """Return the gradients that differ from every eager run, each with its relative difference, the largest first.

    ``is_small`` also returns differences that are a small share of all gradients.
    """
    eager = [attempt.sketches[step] for attempt in repeats]
    found = dict(_differing(eager, graphed.sketches[step], scale, is_small=is_small))
    return sorted(found.items(), key=lambda item: -item[1])


def _differing(
    eager: Sequence[_Gradients], graphed: _Gradients, scale: Mapping[_Place, float], *, is_small: bool
) -> Iterator[tuple[_Place, float]]:
    noise: dict[_Place, float] = dict(scale)
    for one, two in combinations(eager, 2):
        noise = {**noise, **{place: max(noise.get(place, 0.0), size) for place, size in _distances(one, two).items()}}
    of_all = math.sqrt(sum(gradient.norm**2 for gradient in eager[0].values()))
    # A parameter may have a gradient before the capture, but none in a replay that computes others on that rank.
    ranks = {rank for rank, _ in graphed}
    known = {*graphed, *(place for place in scale if place[0] in ranks)}
    for place in known.intersection(*eager):
        replayed = graphed.get(place)
        size = min(one[place].distance(replayed) if replayed else one[place].norm for one in eager)
        norm = max(eager[0][place].norm, replayed.norm if replayed else 0.0)
        is_shown = norm > LEAST_NORM * of_all if is_small else size > LEAST_OF_ALL * of_all
        if is_shown and size > max(NOISE_MULTIPLE * noise.get(place, 0.0), LEAST_OF_ITSELF * norm):
            yield place, size / norm


def _distances(one: _Gradients, two: _Gradients) -> dict[_Place, float]:
    return {place: one[place].distance(two[place]) for place in one.keys() & two.keys()}
