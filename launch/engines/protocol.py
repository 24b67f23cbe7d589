"""The protocol between the training loop and an engine.

The loop owns phases, timing and records. An engine owns the model and its graphs, and reports each step's kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from launch.contract.errors import UnsupportedError
from launch.contract.records.graph_stats import GraphStats
from launch.contract.records.step_check import LayerResult
from launch.contract.spec import RunSpec
from launch.support import layout, unsupported
from launch.support.rule import judge, refuse

StepKind = Literal["warmup", "capture", "steady"]
"""A step before the capture, with the capture, or after it. An eager engine reports "warmup", then "steady"."""


@dataclass(frozen=True)
class RankPlace:
    """The place of this process among the ranks. Its tensors are on ``device``."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True)
class StepResult:
    """Results of a step, on the device. The host has not read them. The caller owns them; they are never graph memory."""

    loss: torch.Tensor
    """float32 (): the mean over the global batch, the same on every rank."""
    grad_norm: torch.Tensor
    """float32 (): the global gradient norm before clipping, the same on every rank."""
    kind: StepKind


class Ranked(NamedTuple):
    """What a choice ranks, in the values of the router that repeats it."""

    values: torch.Tensor
    """(T, topk): the values of the repeated choice."""
    gap: torch.Tensor
    """Shape (): the largest lead of the router's own choice over the repeated one; infinity if rounding cannot explain it."""


class ScoredChoice(Protocol):
    """Experts that a router was told to choose for T tokens."""

    @property
    def ranked(self) -> tuple[Ranked, ...]:
        """How a token ranks its experts, and how an expert with a capacity ranks its tokens."""


ScoredChoices = Mapping[str, ScoredChoice]
"""The choices of each router call, by layer and micro-batch."""


class CheckableStep(Protocol):
    """The next step of an engine, which can be computed from one state by replay and by the same code uncaptured."""

    def state(self) -> list[torch.Tensor]:
        """Return the tensors that this step changes and later steps read."""

    def generators(self) -> Sequence[torch.Generator]:
        """Return the generators from which this step draws random numbers."""

    def replay(self, batch: torch.Tensor) -> None:
        """Compute the captured part of the step from its graphs.

        Args:
            batch: int64 (microbatches, microbatch size, sequence + 1).
        """

    def recompute(self, batch: torch.Tensor, repeated: Mapping[str, torch.Tensor]) -> None:
        """Compute the same part uncaptured. Routers choose ``repeated``, as ``routing`` returns it, unless it is empty."""

    def perturbed(self, toward: float, embedding: bool) -> AbstractContextManager[bool]:
        """Move the first layer's output by one unit in the last place inside the context, and with ``embedding`` its input too.

        Yield whether that is possible. Numbers move ``toward`` infinity or minus infinity.
        """

    def results(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the results of the last computation by name: losses, gradient norm, main gradients, statistics of routers, and
        layer results.
        """

    def layers(self) -> Iterable[LayerResult]:
        """Return the layer results among ``results``; none unless ``RunSpec.layer_check_steps`` is set."""

    def update(self) -> None:
        """Run the optimizer uncaptured on the gradients of the last computation."""

    def updated(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights and moments by name if the graph contains the optimizer and they are compared in this step."""

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what no replay may change: the weights, or those and moments that a captured optimizer has to leave."""

    def routing(self) -> Mapping[str, torch.Tensor]:
        """Return the experts of this rank's tokens in the last computation, int64 (T, topk) by router call.

        ``~expert`` stands for an expert that dropped the token.
        """

    def scored_choices(self) -> ScoredChoices:
        """Return the routers' scores of the choices that they repeated in the last computation."""


class Engine(Protocol):
    """One rank's engine, which trains one model."""

    @property
    def capture_step(self) -> int | None:
        """The step in which graphs are captured; None for an eager run."""

    @property
    def choices(self) -> Mapping[str, str]:
        """The choices that the spec leaves to the engine, by name, for the record, such as the attention kernels."""

    def step(self, batch: torch.Tensor) -> StepResult:
        """Run one optimizer step.

        Args:
            batch: this rank's tokens, int64 (microbatches, microbatch size, sequence + 1).

        Raises:
            launch.contract.errors.CaptureError: the capture failed.
        """

    def checkable_step(self) -> CheckableStep:
        """Return the next step, to check it before it runs. The engine must have captured."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parameters by name, as the forward pass reads them."""

    def graph_stats(self) -> GraphStats:
        """Return the evidence of capture and replay so far."""

    def close(self) -> None:
        """Release graphs. They hold communicators, so close the engine before destroying process groups."""


def check_supported(spec: RunSpec) -> None:
    """Check ``spec`` before an engine is built.

    Raises:
        UnsupportedError: the engine does not support ``spec``. The message names every field at fault.
    """
    refuse((*unsupported(spec), *judge(layout.RULES, spec)), UnsupportedError)
