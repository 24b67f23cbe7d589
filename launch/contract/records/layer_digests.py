"""Digests of layer outputs and gradients: two runs can be compared layer by layer without their activations.

launch/engines/torch_native/layer_digests.py computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from launch.common.atomic_files import read_json_lines
from launch.common.typed_json import from_json
from launch.contract.paths import AttemptPaths

EMBEDDING, FINAL_NORM, HEAD, LOSS = "embedding", "final norm", "output layer", "loss"


def layer_name(number: int | str) -> str:
    return f"decoder layer {number}"


def layer_names(num_layers: int) -> tuple[str, ...]:
    """Return the names of a model's layers in the order of its forward pass."""
    return (EMBEDDING, *map(layer_name, range(num_layers)), FINAL_NORM, HEAD, LOSS)


MISSING = "0" * 16
"""The value of a digest that was never written. A real digest has it once in 2 ** 64."""


def _check_digest(digest: Any, name: str) -> None:
    if not isinstance(digest, str) or len(digest) != len(MISSING) or digest == MISSING:
        raise ValueError(f"{digest!r} in {name} is not a digest")


Digest = Annotated[str, _check_digest]


@dataclass(frozen=True)
class StepDigests:
    """The digests of one rank's layers in a step, by layer name, each sixteen hexadecimal digits.

    ``outputs`` and ``gradients`` have one digest per micro-batch; ``gradients`` are those of the loss with respect to the outputs.
    ``parameter_gradients`` are the main gradients that the update uses, summed over micro-batches and replicas. ``parameters`` are
    a layer's parameters and buffers after the update.
    """

    step: int
    outputs: Mapping[str, tuple[Digest, ...]]
    gradients: Mapping[str, tuple[Digest, ...]]
    parameter_gradients: Mapping[str, Digest]
    parameters: Mapping[str, Digest]


def hexadecimal(digest: int) -> str:
    """Format a 64-bit digest, which PyTorch stores with a sign."""
    return f"{digest % 2**64:016x}"


def read_digests(attempt: AttemptPaths, rank: int) -> Iterator[StepDigests]:
    """Read the digests of a rank, step by step.

    Raises:
        launch.common.atomic_files.RecordError: the file is not JSON.
        TypeError, ValueError: a line has another shape, or one of its digests was never written.
    """
    for line in read_json_lines(attempt.digests(rank)):
        yield from_json(StepDigests, line)
