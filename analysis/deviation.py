"""How far two curves are apart, step by step and after the capture: measurements only, no rule.

Differences are infinite wherever a side is not finite, so that no comparison with a margin can let one through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from analysis.steps import Booleans, Floats, Integers, Metric, Steps

METRIC_NAMES: dict[Metric, str] = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class Floor:
    """How far eager repeats are from each other: the largest difference between any two over the compared steps.

    ``loss`` is absolute (nats), ``grad_norm`` relative to the smaller of the two.
    """

    repeats: int
    loss: float
    grad_norm: float

    def of(self, metric: Metric) -> float:
        return self.loss if metric == "loss" else self.grad_norm


@dataclass(frozen=True)
class Spread:
    """:class:`Floor` step by step, before the window is known; arrays have shape (expected steps,)."""

    repeats: int
    loss: Floats
    grad_norm: Floats

    def floor(self, first: int) -> Floor:
        """The floor over steps ``first`` and later."""
        return Floor(self.repeats, float(np.max(self.loss[first:])), float(np.max(self.grad_norm[first:])))


@dataclass(frozen=True)
class Evidence:
    """What a verdict stands on. Differences are infinite where a side is not finite."""

    first_step: int
    last_step: int
    steps: int
    max_loss_difference: float
    max_loss_step: int
    max_grad_norm_difference: float
    """Relative to the eager gradient norm."""
    max_grad_norm_step: int
    bitwise_prefix: int
    """Leading steps, from step 0, whose loss and gradient norm are equal to the bit."""
    floor: Optional[Floor]


@dataclass(frozen=True)
class Deviation:
    """Where and by how much a graphed run first left its eager twin."""

    step: int
    metric: Metric
    size: float


@dataclass(frozen=True)
class Window:
    """Two curves over the same steps from 0, and their differences after the capture: shape (steps,)."""

    eager: Steps
    graphed: Steps
    first: int
    """The first step after the capture."""
    loss: Floats
    grad_norm: Floats

    def of(self, metric: Metric) -> Floats:
        return self.loss if metric == "loss" else self.grad_norm


def incomplete(steps: Steps, expected: int, side: str) -> str:
    """What is wrong with the numbering of ``steps``, in words; empty where they are 0 to ``expected`` - 1, in order."""
    if np.array_equal(steps.step, np.arange(expected)):
        return ""
    found = steps.step.tolist()
    missing = sorted(set(range(expected)) - set(found))
    unexpected = sorted(set(found) - set(range(expected)))
    twice = sorted(step for step, count in Counter(found).items() if count > 1)
    parts = [f"{_listed(missing)} missing of {expected}" if missing else ""]
    parts += [f"{_listed(unexpected)} not expected (steps are 0 to {expected - 1})" if unexpected else ""]
    parts += [f"{_listed(twice)} recorded more than once" if twice else ""]
    said = "; ".join(part for part in parts if part) or "steps are out of order"
    return f"{side} run: {said}"


def _listed(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def spread_of(repeats: Sequence[Steps]) -> Optional[Spread]:
    """How far complete eager ``repeats`` of one workload are apart, step by step; None for fewer than two."""
    if len(repeats) < 2:
        return None
    loss = np.stack([steps.loss for steps in repeats])
    norm = np.stack([steps.grad_norm for steps in repeats])
    low = norm.min(axis=0)
    return Spread(
        repeats=len(repeats),
        loss=_difference(loss.min(axis=0), loss.max(axis=0)),
        grad_norm=_relative(_difference(low, norm.max(axis=0)), low),
    )


def _difference(a: Floats, b: Floats) -> Floats:
    """Absolute difference, shape kept; infinite wherever a side is not finite, equal or not."""
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(finite, np.abs(a - b), np.inf)


def _relative(difference: Floats, reference: Floats) -> Floats:
    """``difference`` over ``|reference|``; no difference is 0 even where the reference is 0 too."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(difference == 0, 0.0, np.nan_to_num(difference / np.abs(reference), nan=np.inf, posinf=np.inf))


def bitwise_equal(a: Floats, b: Floats) -> Booleans:
    """Element by element, whether two arrays hold the same bits."""
    return np.equal(np.ascontiguousarray(a).view(np.int64), np.ascontiguousarray(b).view(np.int64))


def finite_steps(steps: Steps) -> Booleans:
    return np.isfinite(steps.loss) & np.isfinite(steps.grad_norm)


def shared_steps(eager: Steps, graphed: Steps) -> int:
    """How many leading steps both have, each in its place."""
    length = min(len(eager), len(graphed))
    places = np.arange(length)
    in_place = (eager.step[:length] == places) & (graphed.step[:length] == places)
    return length if in_place.all() else int(np.argmin(in_place))


def window_of(eager: Steps, graphed: Steps, first: int) -> Window:
    norm = eager.grad_norm[first:]
    return Window(
        eager=eager,
        graphed=graphed,
        first=first,
        loss=_difference(eager.loss[first:], graphed.loss[first:]),
        grad_norm=_relative(_difference(norm, graphed.grad_norm[first:]), norm),
    )


def absolute_loss_difference(eager: Steps, graphed: Steps) -> tuple[Integers, Floats]:
    """Steps that both runs recorded, and their absolute loss difference; both of shape (shared steps,)."""
    step, left, right = np.intersect1d(eager.step, graphed.step, return_indices=True)
    return step, _difference(eager.loss[left], graphed.loss[right])


def ended_together(window: Window, eager: Steps, graphed: Steps) -> bool:
    """Whether both runs end at the same step with a number that is not finite: nothing is missing then."""
    ended = len(window.eager) == len(eager) == len(graphed)
    return ended and not finite_steps(eager)[-1] and not finite_steps(graphed)[-1]


def evidence_of(window: Window, spread: Optional[Spread]) -> Evidence:
    equal = _equal_steps(window)
    return Evidence(
        first_step=window.first,
        last_step=len(window.eager) - 1,
        steps=len(window.loss),
        max_loss_difference=float(np.max(window.loss)),
        max_loss_step=window.first + int(np.argmax(window.loss)),
        max_grad_norm_difference=float(np.max(window.grad_norm)),
        max_grad_norm_step=window.first + int(np.argmax(window.grad_norm)),
        bitwise_prefix=len(equal) if equal.all() else int(np.argmin(equal)),
        floor=spread.floor(window.first) if spread else None,
    )


def first_one_sided(window: Window) -> Optional[Deviation]:
    """The first number after the capture that is finite on one side and not on the other (rule 1)."""
    found = []
    for metric in METRIC_NAMES:
        after = slice(window.first, None)
        differs = np.isfinite(window.eager.of(metric)[after]) != np.isfinite(window.graphed.of(metric)[after])
        if differs.any():
            found.append(Deviation(window.first + int(np.argmax(differs)), metric, float("inf")))
    return min(found, key=lambda deviation: deviation.step, default=None)


def first_beyond(window: Window, metric: Metric, margin: float) -> Optional[Deviation]:
    """The first step at which two finite values are not within ``margin``."""
    difference = window.of(metric)
    after = slice(window.first, None)
    finite = np.isfinite(window.eager.of(metric)[after]) & np.isfinite(window.graphed.of(metric)[after])
    beyond = ~(difference <= margin) & finite
    if not beyond.any():
        return None
    index = int(np.argmax(beyond))
    return Deviation(window.first + index, metric, float(difference[index]))


def bitwise(window: Window) -> bool:
    """Whether every loss and gradient norm after the capture is equal to the bit."""
    return bool(_equal_steps(window)[window.first :].all())


def _equal_steps(window: Window) -> Booleans:
    loss = bitwise_equal(window.eager.loss, window.graphed.loss)
    return loss & bitwise_equal(window.eager.grad_norm, window.graphed.grad_norm)
