"""A step check: one step of a graphed run, computed by replay and by the same code uncaptured, from the same state.

The scale of harmless rounding is measured in the same place: the uncaptured code runs a second time, and once more with the
first layer's output moved by one unit in the last place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from launch.common.typed_json import Amount, Count

EMBEDDING, FINAL_NORM = "embedding", "final norm"

NOISE_MULTIPLE = 6.0
"""Differences up to so many times the noise are rounding. docs/step_check.md has the figures that it stands on."""


@dataclass(frozen=True)
class TensorDifference:
    """How a result of the replay differs from that of the uncaptured code.

    Differences are 2-norms relative to the replayed result. A result that is not finite on one side alone differs by 1e300.
    """

    name: str
    difference: Amount
    noise: Amount
    """The larger one of two differences: of two passes of the uncaptured code, and that which the perturbation makes. At least
    the spacing of the result's numbers. Losses and the norm are single numbers, which a perturbation may leave by chance:
    they share the largest noise of them."""

    @property
    def in_noise(self) -> float:
        """Return the difference in units of the noise."""
        return self.difference / self.noise

    @property
    def is_fault(self) -> bool:
        return self.in_noise > NOISE_MULTIPLE


@dataclass(frozen=True)
class RoutingDifference:
    """Tokens of one layer and micro-batch that the replay sends to other experts than the uncaptured code does."""

    name: str
    tokens: Count
    gap: Amount
    """The most by which the uncaptured code ranks its own choice higher, in scores."""
    noise: Amount
    """The largest change of any router's score in a second pass, or by the perturbation. The first router sees no
    perturbation, hence that of any."""

    @property
    def in_noise(self) -> float:
        """Return the gap in units of the noise, which is 0 if no score changes."""
        return self.gap / self.noise if self.noise else (float("inf") if self.gap else 0.0)

    @property
    def is_fault(self) -> bool:
        return self.in_noise > NOISE_MULTIPLE


@dataclass(frozen=True)
class LayerResult:
    """A layer's output in one micro-batch, or the gradient of that output.

    ``position`` is the layer's in the forward pass of the whole model: 0 for the embedding, 1 for decoder layer 0.
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
        """Return its place in the order of a step, in which all outputs come before their gradients."""
        return self.is_gradient, self.micro_batch, -self.position if self.is_gradient else self.position


def layer_names(num_layers: int) -> tuple[str, ...]:
    """Return the names of a model's layers by position."""
    return (EMBEDDING, *(f"decoder layer {number}" for number in range(num_layers)), FINAL_NORM)


def with_article(layer: str) -> str:
    return f"the {layer}" if layer in (EMBEDDING, FINAL_NORM) else layer


@dataclass(frozen=True)
class StepCheck:
    """What one rank found in one checked step.

    ``differences`` has the results that differ in a bit, the worst first, ``MOST_DIFFERENCES`` at most.
    """

    step: Count
    tensors: Count = 0
    """How many results were compared: losses of micro-batches, the gradient norm, and every parameter's main gradient; with a
    captured optimizer also weights and moments."""
    unequal: Count = 0
    differences: tuple[TensorDifference, ...] = ()
    routing: tuple[RoutingDifference, ...] = ()
    calibrated: bool = True
    """False: results differ, but their noise is unknown and recorded as 1e300: the first layer cannot be perturbed, or choices of
    routers are hidden."""
    noise: Amount = 0.0
    """The largest noise of any result that differs in a bit."""
    seconds: Amount = 0.0
    first: tuple[LayerResult, TensorDifference] | None = None
    """The first result of a layer that is a fault, if results of layers are compared (RunSpec.layer_check_steps)."""
    missing: Count = 0
    """How many bytes of memory were missing, on the rank that lacked most. The step was not checked then."""
    missing_on: Literal["GPU", "host"] = "GPU"

    def __post_init__(self) -> None:
        """Raise ValueError if nothing was compared, though no memory was missing, or the counts contradict each other."""
        shown = min(self.unequal, MOST_DIFFERENCES)
        compared = self.tensors > 0 if not self.missing else self.tensors == 0
        if not (compared and self.unequal <= self.tensors and len(self.differences) == shown):
            raise ValueError(
                f"the check of step {self.step} compared {self.tensors} results, with {self.unequal} unequal ones and "
                f"{len(self.differences)} of their differences: these contradict each other"
            )

    @property
    def rows(self) -> tuple[RoutingDifference | TensorDifference, ...]:
        return *self.routing, *self.differences

    @property
    def largest_noise(self) -> float:
        """Return the largest noise, relative to its result or in scores."""
        return max(self.noise, *(row.noise for row in self.rows), 0.0)


MOST_DIFFERENCES = 32
