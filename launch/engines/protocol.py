"""The protocol between the training loop and an engine.

The loop owns phases, timing and records; an engine owns the model and how it is captured. Implementations capture at
different moments (between steps, inside a step, at the end of the first), so the engine says of each step what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from launch.contract.errors import UnsupportedError
from launch.contract.records.graph_stats import GraphStats
from launch.contract.spec import RunSpec
from launch.support import layout, unsupported
from launch.support.rule import judge, refuse

StepKind = Literal["warmup", "capture", "steady"]
"""What a step was: before the capture, the capture's own, or after it. An eager engine reports its warm-up steps as
"warmup" and all others as "steady"."""


@dataclass(frozen=True)
class RankPlace:
    """This process's place among the ranks. ``device`` is where its tensors live."""

    rank: int
    world_size: int
    device: torch.device


@dataclass(frozen=True)
class LayerDigests:
    """Digests of what this rank's layers gave in one step, int64 on the device;
    launch.contract.records.layer_digests.StepDigests says of what.

    ``outputs`` and ``gradients`` are of shape (layers, microbatches), the others of shape (holders,): not every layer
    holds parameters.
    """

    layers: tuple[str, ...]
    holders: tuple[str, ...]
    outputs: torch.Tensor
    gradients: torch.Tensor
    parameter_gradients: torch.Tensor
    parameters: torch.Tensor


@dataclass(frozen=True)
class StepResult:
    """What a step leaves on the device: nothing here has been read by the host.

    ``loss`` is the mean over the global batch, a float32 scalar of shape (), the same on every rank; ``grad_norm`` is
    the global gradient norm before clipping, likewise. All are the caller's own (never graph memory). ``digests`` are
    there in the first steps of a spec that asks for them (RunSpec.digest_steps).
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor
    kind: StepKind
    digests: LayerDigests | None = None


class Engine(Protocol):
    """One model under training, on one rank."""

    @property
    def capture_step(self) -> int | None:
        """The step in which graphs are captured, declared beforehand; None for an eager run."""

    @property
    def choices(self) -> Mapping[str, str]:
        """What the engine chose where the spec left it open, by name, for the record: which kernels attention uses."""

    def step(self, batch: torch.Tensor) -> StepResult:
        """One optimizer step.

        Args:
            batch: this rank's tokens, int64 of shape (microbatches, microbatch size, sequence length + 1).

        Raises:
            launch.contract.errors.CaptureError: the capture this step was to make failed.
        """

    def graph_stats(self) -> GraphStats:
        """Evidence of what was captured and what ran from it, so far."""

    def close(self) -> None:
        """Release graphs, before communicators are."""


Build = Callable[[RunSpec, RankPlace], Engine]


def check_supported(spec: RunSpec) -> None:
    """What every ``build`` does first.

    Raises:
        UnsupportedError: the engine that ``spec`` names cannot run it; the message names every field at fault.
    """
    refuse((*unsupported(spec), *judge(layout.RULES, spec)), UnsupportedError)
