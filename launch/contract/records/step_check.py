"""A step check computes one step of a graphed run twice from the same state: by replay, and by the same code uncaptured.

It also measures how large harmless rounding is from this state. For that, the uncaptured code runs a second time, and once more
with the first layer's output moved by one unit in the last place. If this does not explain a difference, it runs twice more with
the first layer's input moved too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from launch.common.typed_json import Amount, Count

EMBEDDING, FINAL_NORM = "embedding", "final norm"

NOISE_MULTIPLE = 6.0
"""Differences of at most this multiple of the noise count as rounding. docs/step_check.md has the measurements behind it."""
SMALL_NOISE_MULTIPLE = 100.0
"""The same for differences below ``SMALL_DIFFERENCE``. If noise is that small, faults are over 10,000 times as large as it, but
rounding in ill-conditioned layers was 19 times as large."""
SMALL_DIFFERENCE = 5e-4
LARGE_NOISE_MULTIPLE = 30.0
"""The same in a check with a result whose noise hides everything. There, rounding was 23 times the noise of other results."""

COMPARISON_BYTES = 2**29
"""GPU memory for the temporary tensors of a comparison, which a check needs in addition to an eager step."""

BROKEN_CAPACITY = 1e300
"""The gap of routers whose experts keep more or fewer tokens than their capacity allows. Rounding cannot explain it."""


def hides_everything(noise: float) -> bool:
    """Return whether even a difference as large as a result would be no fault of a result with ``noise``."""
    return NOISE_MULTIPLE * noise >= 1


def noise_multiple(noise: float, largest: float) -> float:
    """Return how many times ``noise`` a result may differ by rounding, in a check whose largest noise is ``largest``."""
    least = LARGE_NOISE_MULTIPLE if hides_everything(largest) else NOISE_MULTIPLE
    return min(max(SMALL_DIFFERENCE / noise, least), SMALL_NOISE_MULTIPLE)


@dataclass(frozen=True)
class TensorDifference:
    """How a result of the replay differs from that of the uncaptured code.

    Differences are 2-norms relative to the replayed result. A result that is finite on only one side differs by 1e300.
    """

    name: str
    difference: Amount
    noise: Amount
    """The larger of two differences: between two passes of the uncaptured code, and between a plain and a perturbed pass. If the
    first layer amplifies rounding inside it, passes with its input perturbed count too. The noise is at least the spacing of the
    result's numbers. Losses and the gradient norm are single numbers, which a perturbation may leave unchanged by chance, so all
    of them share their largest noise."""
    multiple: Amount = NOISE_MULTIPLE
    """A difference of more than this many times the noise is a fault. 0 for what a replay may not change."""

    @property
    def in_noise(self) -> float:
        """Return the difference in units of the noise."""
        return _in_units(self.difference, self.noise)

    @property
    def limit(self) -> float:
        return self.multiple * self.noise

    @property
    def in_limits(self) -> float:
        """Return the difference in units of the limit. Above 1 it is a fault."""
        return _in_units(self.difference, self.limit)

    @property
    def is_fault(self) -> bool:
        return self.in_limits > 1


@dataclass(frozen=True)
class RoutingDifference:
    """Tokens of one layer and micro-batch that the replay and the uncaptured code send to, or keep at, different experts."""

    name: str
    tokens: Count
    gap: Amount
    """By the scores of the uncaptured code, the largest lead of its own choice over that of the replay. If experts drop tokens,
    by their weights too: what counts is the lead that is larger in units of its noise. 1e300 if an expert keeps more tokens than
    its capacity, or drops one although places are free."""
    noise: Amount
    """The largest change of any router's score or weight, in a second pass or by the perturbation. All routers of all ranks share
    it, because the perturbation does not reach the first router. If it reaches none, passes with the first layer's input
    perturbed count."""

    @property
    def breaks_capacity(self) -> bool:
        """Return whether an expert keeps more tokens than its capacity, or drops one although places are free."""
        return self.gap >= BROKEN_CAPACITY

    @property
    def in_noise(self) -> float:
        """Return the gap in units of the noise."""
        return _in_units(self.gap, self.noise)

    @property
    def limit(self) -> float:
        return NOISE_MULTIPLE * self.noise

    @property
    def in_limits(self) -> float:
        """Return the gap in units of the limit. Above 1 it is a fault."""
        return _in_units(self.gap, self.limit)

    @property
    def is_fault(self) -> bool:
        return self.in_limits > 1


def _in_units(size: float, unit: float) -> float:
    """Return ``size`` in units of ``unit``; infinity if that is 0."""
    return size / unit if unit else (math.inf if size else 0.0)


@dataclass(frozen=True)
class LayerResult:
    """A layer's output in one micro-batch, or the gradient of that output.

    ``position`` is the layer's place in the forward pass of the whole model: 0 for the embedding, 1 for decoder layer 0.
    """

    layer: str
    position: Count
    micro_batch: Count
    is_gradient: bool

    @property
    def name(self) -> str:
        output = f"output of {with_article(self.layer)}, micro-batch {self.micro_batch}"
        return f"gradient of the {output}" if self.is_gradient else output

    @property
    def place(self) -> tuple[bool, int, int]:
        """Return a sort key: the order within a step, with all outputs before all gradients."""
        return self.is_gradient, self.micro_batch, -self.position if self.is_gradient else self.position


def layer_names(num_layers: int) -> tuple[str, ...]:
    """Return the names of a model's layers by position."""
    return (EMBEDDING, *(f"decoder layer {number}" for number in range(num_layers)), FINAL_NORM)


def with_article(layer: str) -> str:
    return f"the {layer}" if layer in (EMBEDDING, FINAL_NORM) else layer


@dataclass(frozen=True)
class StepCheck:
    """What one rank found in one checked step.

    ``differences`` has at most ``MOST_DIFFERENCES`` results that differ in a bit, the worst first.
    """

    step: Count
    tensors: Count = 0
    """The number of compared results: losses of micro-batches, the gradient norm, and every parameter's main gradient. With a
    captured optimizer they include its weights and moments."""
    unequal: Count = 0
    differences: tuple[TensorDifference, ...] = ()
    routing: tuple[RoutingDifference, ...] = ()
    calibrated: bool = True
    """False if results differ and their noise is unknown (recorded as 1e300). Then the first layer cannot be perturbed, or the
    routers' choices are hidden, and repetitions of the uncaptured code do not explain the differences."""
    noise: Amount = 0.0
    """The largest noise of any result that differs in a bit and, if tokens move, of routers' scores and weights."""
    seconds: Amount = 0.0
    first: tuple[LayerResult, TensorDifference] | None = None
    """The first layer result that is a fault, if layers are compared (RunSpec.layer_check_steps)."""
    missing: Count = 0
    """If above 0, memory was too small and the step was not checked: bytes missing on the rank that lacked most."""
    missing_on: Literal["GPU", "host"] = "GPU"
    left_out: Count = 0
    """How many weights and moments of a captured optimizer this check held back. It only compared that the replay leaves them as
    they are. Another check of the run compares their update."""

    def __post_init__(self) -> None:
        """Raise ValueError if the counts contradict each other, or if nothing was compared although memory sufficed."""
        shown = min(self.unequal, MOST_DIFFERENCES)
        compared = self.tensors > 0 if not self.missing else self.tensors == 0
        if not (compared and self.unequal <= self.tensors and len(self.differences) == shown):
            raise ValueError(
                f"the counts of the check of step {self.step} contradict each other: {self.tensors} results, {self.unequal} "
                f"unequal ones, {len(self.differences)} differences"
            )

    @property
    def rows(self) -> tuple[RoutingDifference | TensorDifference, ...]:
        return *self.routing, *self.differences

    @property
    def lacks_noise(self) -> bool:
        """Return whether results differ, and nothing says how much rounding explains."""
        return self.unequal > 0 and not self.calibrated

    @property
    def largest_noise(self) -> float:
        """Return the largest noise. That of a tensor is relative to its result; that of routing is in scores."""
        return max(self.noise, *(row.noise for row in self.rows), 0.0)


MOST_DIFFERENCES = 32
