"""Digests of what layers give: integers that differ where any bit does, so that two runs can be held against each other
layer by layer without their activations. Plain Python; launch/engines/torch_native/layer_digests.py computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launch.common.atomic_files import read_json_lines
from launch.contract.paths import AttemptPaths

EMBEDDING, FINAL_NORM, HEAD, LOSS = "embedding", "final norm", "output layer", "loss"


def layer_name(number: int | str) -> str:
    return f"decoder layer {number}"


def layer_names(num_layers: int) -> tuple[str, ...]:
    """Of a whole model, in the order of its forward pass."""
    return (EMBEDDING, *map(layer_name, range(num_layers)), FINAL_NORM, HEAD, LOSS)


@dataclass(frozen=True)
class StepDigests:
    """What one rank's layers gave in a step, by the layer's name: sixteen hexadecimal digits a digest.

    ``outputs`` and ``gradients`` hold one a micro-batch, ``gradients`` those of the loss by the outputs.
    ``parameter_gradients`` are of the main gradients that the update is made from, all micro-batches and replicas in them;
    ``parameters`` of what a layer holds when the update has been made, its buffers included.
    """

    step: int
    outputs: Mapping[str, tuple[str, ...]]
    gradients: Mapping[str, tuple[str, ...]]
    parameter_gradients: Mapping[str, str]
    parameters: Mapping[str, str]


MISSING = "0" * 16
"""What stands where nothing was written: a digest is that by accident once in 2 ** 64."""


def hexadecimal(digest: int) -> str:
    """A digest of 64 bits, which PyTorch holds with a sign."""
    return f"{digest % 2**64:016x}"


def read_digests(attempt: AttemptPaths, rank: int) -> Iterator[StepDigests]:
    """A rank's, step by step.

    Raises:
        launch.common.atomic_files.RecordError: the file is not JSON.
        TypeError, ValueError: a line is of another shape, or a digest in it was never written.
    """
    for line in read_json_lines(attempt.digests(rank)):
        yield _from_json(line)


def _from_json(content: Mapping[str, Any]) -> StepDigests:
    found = StepDigests(**content)
    if type(found.step) is not int:
        raise TypeError(f"step is {found.step!r}, not a whole number")
    return StepDigests(
        found.step,
        _of_micro_batches(found.outputs),
        _of_micro_batches(found.gradients),
        _of_step(found.parameter_gradients),
        _of_step(found.parameters),
    )


def _of_micro_batches(content: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {layer: tuple(map(_checked, digests)) for layer, digests in content.items()}


def _of_step(content: Mapping[str, Any]) -> dict[str, str]:
    return {layer: _checked(digest) for layer, digest in content.items()}


def _checked(digest: Any) -> str:
    if not isinstance(digest, str) or len(digest) != len(MISSING) or digest == MISSING:
        raise ValueError(f"{digest!r} is no digest")
    return digest
