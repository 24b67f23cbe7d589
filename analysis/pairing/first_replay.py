"""Compare the gradients of the first replayed steps with those of eager runs, parameter by parameter.

Both runs took the same steps up to the capture. So a replay that computes something else shows at once, in the affected
parameters, and long before it shows in a curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from analysis.records.run import Attempt
from analysis.verdict.verdict import Verdict
from launch.common.grouped import grouped
from launch.common.text import listed
from launch.contract.records.sketch import Sketch
from launch.contract.records.step_check import NOISE_MULTIPLE

LEAST_OF_ITSELF, LEAST_OF_ALL = 1 / 16, 1 / 50
"""A fault exceeds the first share of its gradient's norm and the second share of the norm of all gradients.

Rounding of other kernels stays below the first share in gradients that large.
"""
LEAST_IF_ROUTED = 1 / 2
"""The first share in models with experts. Rounding there routes tokens to other experts, which moved gradients by up to 0.3 in bf16.
"""
LEAST_NORM = 1 / 5000
"""A smaller difference is a doubt if the gradient's norm exceeds this share of the norm of all gradients.

Losses hardly depend on such a parameter, so their curves agree even if the replay is wrong. Gradients that are mere rounding
errors, such as that of a key's bias, have smaller norms.
"""
MEDIAN_MULTIPLE, MOST_ROUNDING = 4.5, 1 / 8
"""Rounding of other kernels makes a small gradient differ by at most LEAST_OF_ITSELF or this multiple of the median share, but by
no more than the second share.

In bf16, attention by another kernel moved the median gradient of 2 to 64 layers by 0.6 to 1.6%, and nearly all by less than three
times that. Single gradients of layer norms moved by up to eleven times the median, so one gradient alone is no doubt.
"""
LEAST_ALONE = 1 / 4
"""A small gradient that differs by this share is a doubt alone."""
_HARDLY_SEEN = "Losses and gradient norms hardly depend on them, so agreeing curves prove little"
_ROUTED = "This may be a fault, or rounding that routes tokens to other experts"
MOST_NAMED = 3
FIRST_REPLAYS = 3

_Place = tuple[int, str]
"""A rank, and the name of a parameter."""
_Gradients = Mapping[_Place, Sketch]


@dataclass(frozen=True)
class _Difference:
    """How far a replayed gradient is from the nearest eager one. ``noise`` is the distance that eager runs explain."""

    size: float
    norm: float
    noise: float
    """The largest of three differences: between eager runs in the same step, between them in all steps up to the first replays, and
    at the step before the capture."""
    of_all: float
    """The norm of all gradients."""
    least: float = LEAST_OF_ITSELF
    """The share of the norm that a fault exceeds."""

    @property
    def share(self) -> float:
        return self.size / self.norm if self.norm else 0.0

    @property
    def is_fault(self) -> bool:
        return self.size > max(NOISE_MULTIPLE * self.noise, self.least * self.norm) and self.is_large

    @property
    def is_large(self) -> bool:
        """Whether losses and gradient norms depend on the difference."""
        return self.size > LEAST_OF_ALL * self.of_all


_Differences = Mapping[_Place, _Difference]


@dataclass(frozen=True)
class FirstReplays:
    """The differences of the gradients in the first replays, by step. It is empty if they cannot be judged."""

    steps: Mapping[int, _Differences]

    def fault(self) -> Verdict | None:
        """Return DIVERGED if a gradient differs from those of eager runs, else None."""
        for step, differences in self.steps.items():
            if found := {place: one.share for place, one in differences.items() if one.is_fault}:
                reason = (
                    f"graphed runs compute other gradients in step {step}, although eager runs agree: {_named(found)}"
                )
                return Verdict(
                    "DIVERGED",
                    reason,
                    "make sure that both commands differ in graphs alone; then capture fewer parts until the gradients are equal",
                )
        return None

    def doubt(self) -> Verdict | None:
        """Return INCONCLUSIVE if small gradients differ by more than rounding explains, else None. It doubts only a pass."""
        if not (found := _unexplained(list(self.steps.values()))):
            return None
        steps = listed([str(step) for step in self.steps], FIRST_REPLAYS)
        is_large = any(differences[place].is_large for differences in self.steps.values() for place in found)
        size, why = ("", _ROUTED) if is_large else ("small ", _HARDLY_SEEN)
        reason = (
            f"{size}gradients differ in step{'s' if len(self.steps) > 1 else ''} {steps}, although eager runs agree: "
            f"{_named(found)}. {why}"
        )
        return Verdict(
            "INCONCLUSIVE",
            reason,
            "find out what graphs compute otherwise there: an input that the capture left out (such as rotary embeddings), "
            "other kernels (such as another attention backend), or experts to which rounding routes other tokens; else capture "
            "fewer parts until the gradients are equal",
        )


def compare_first_replays(eager: Attempt, graphed: Attempt, others: Sequence[Attempt], captured: int) -> FirstReplays:
    """Compare gradients in the first steps after step ``captured`` with those of eager runs.

    Nothing is compared without a second eager run in ``others``, or if the runs already differ before the capture.
    """
    repeats = [attempt for attempt in (eager, *others) if attempt.sketches]
    if len(repeats) < 2 or not graphed.sketches:
        return FirstReplays({})
    steps = sorted(step for step in graphed.sketches if all(step in attempt.sketches for attempt in repeats))
    replays = [step for step in steps if step > captured][:FIRST_REPLAYS]
    noise = _noise(repeats, [step for step in steps if not replays or step <= replays[-1]])
    before = [step for step in steps if step < captured][-1:]
    if before and any(one.is_fault for one in _differences(repeats, graphed, before[0], noise, {}).values()):
        return FirstReplays({})
    scale = _distances(eager.sketches[before[0]], graphed.sketches[before[0]]) if before else {}
    return FirstReplays({step: _differences(repeats, graphed, step, noise, scale) for step in replays})


def _named(found: Mapping[_Place, float]) -> str:
    largest = sorted(found.items(), key=lambda item: -item[1])
    gradients = [f"{name} on rank {rank} by {share:.2g} of it" for (rank, name), share in largest]
    return listed(gradients, MOST_NAMED, "; ")


def _noise(repeats: Sequence[Attempt], steps: Sequence[int]) -> dict[_Place, float]:
    """Return the distance of eager gradients as a share of their norm: the root of its mean square over ``steps``."""
    shares = grouped(
        (place, size / one[place].norm if one[place].norm else 0.0)
        for step in steps
        for one, two in combinations([attempt.sketches[step] for attempt in repeats], 2)
        for place, size in _distances(one, two).items()
    )
    return {place: _root_mean_square(found) for place, found in shares.items()}


def _differences(
    repeats: Sequence[Attempt],
    graphed: Attempt,
    step: int,
    shares: Mapping[_Place, float],
    scale: Mapping[_Place, float],
) -> dict[_Place, _Difference]:
    """Return how the gradients of ``step`` differ. ``shares`` is the noise as shares of norms; ``scale`` that before the capture."""
    eager, replays = [attempt.sketches[step] for attempt in repeats], graphed.sketches[step]
    noise = dict(scale)
    for one, two in combinations(eager, 2):
        noise |= {place: max(noise.get(place, 0.0), size) for place, size in _distances(one, two).items()}
    # Ranks may hold copies of one parameter, whose sketches are equal.
    of_all = math.sqrt(sum(gradient.norm**2 for gradient in {*eager[0].values()}))
    # A parameter may have a gradient before the capture, but none in a replay that computes others on that rank.
    ranks = {rank for rank, _ in replays}
    is_routed = any(word in name.lower() for _, name in eager[0] for word in ("expert", "router"))
    least = LEAST_IF_ROUTED if is_routed else LEAST_OF_ITSELF
    known = {*replays, *(place for place in scale if place[0] in ranks)}
    found = {}
    for place in sorted(known.intersection(*eager)):
        replayed = replays.get(place)
        size = min(one[place].distance(replayed) if replayed else one[place].norm for one in eager)
        norm = max(eager[0][place].norm, replayed.norm if replayed else 0.0)
        own_noise = max(noise.get(place, 0.0), shares.get(place, 0.0) * eager[0][place].norm)
        found[place] = _Difference(size, norm, own_noise, of_all, least)
    return found


def _unexplained(replays: Sequence[_Differences]) -> dict[_Place, float]:
    """Return the small gradients whose differences neither noise nor rounding explains, each with its share over all ``replays``.

    All steps count together, because estimates from few sums scatter.
    """
    every = (item for differences in replays for item in differences.items())
    steps = grouped((place, one) for place, one in every if one.norm > LEAST_NORM * one.of_all)
    shares = {place: _root_mean_square([one.share for one in found]) for place, found in steps.items()}
    usual = median(shares.values()) if shares else 0.0
    rounding = min(MEDIAN_MULTIPLE * usual, MOST_ROUNDING) if usual <= LEAST_OF_ITSELF else 0.0
    found = {
        place: share
        for place, share in shares.items()
        if share > max(LEAST_OF_ITSELF, rounding)
        and share > NOISE_MULTIPLE * _root_mean_square([one.noise / one.norm for one in steps[place]])
    }
    names = {name for _, name in found}
    alone = (
        place for place, share in found.items() if share > LEAST_ALONE or any(one.is_large for one in steps[place])
    )
    return found if len(names) > 1 or any(alone) else {}


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _distances(one: _Gradients, two: _Gradients) -> dict[_Place, float]:
    return {place: one[place].distance(two[place]) for place in one.keys() & two.keys()}
