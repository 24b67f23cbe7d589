"""Model and loss, compiled as one function by Inductor.

This module imports Dynamo only when it compiles, because that import takes as long as the rest of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from launch.contract.errors import CaptureError, OrchestratorError
from launch.engines.torch_native.decoder import Decoder, Losses, ObserveOutput


class CompiledModel:
    """Runs a decoder that is the whole model, compiled for static shapes.

    With ``training.compile: whole`` every step uses it. With ``cuda_graph.impl: torch_compile`` steps from the capture on use
    it, in Inductor's CUDA graphs.

    Args:
        options: mode or backend of ``torch.compile``; by default Inductor without CUDA graphs.
    """

    def __init__(self, decoder: Decoder, **options: Any) -> None:
        self._run = torch.compile(decoder, fullgraph=True, dynamic=False, **options)
        self.compilations = 0
        """The number of times that Dynamo compiled this function. Its backward pass does not count separately."""

    def __call__(self, tokens: torch.Tensor, observe: ObserveOutput) -> Losses:
        """Compute the losses of a microbatch, int64 (batch, sequence + 1)."""
        before = _compiled_frames()
        losses: Losses = self._run(tokens, observe)
        self.compilations += _compiled_frames() - before
        return losses

    @property
    def recompilations(self) -> int:
        return max(0, self.compilations - 1)


def _compiled_frames() -> int:
    """Return how many functions Dynamo has compiled in this process, including recompilations."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def disable_kernel_timing() -> None:
    """Make Inductor choose between kernels by rules, not by timing them on the device.

    Its deterministic mode covers only the kernels that it knows to round differently, and still times the block sizes of
    pointwise kernels. Those probably changed bits as well (docs/determinism.md).
    """
    from torch._inductor import config

    config.deterministic = True
    config.triton.autotune_pointwise = False


@contextmanager
def compile_errors_as(setting: str, error: type[OrchestratorError]) -> Iterator[None]:
    """Convert a failure of Dynamo or Inductor to ``error``, with a message that names ``setting``."""
    try:
        yield
    except RuntimeError as failure:
        dynamo = sys.modules.get("torch._dynamo.exc")
        if dynamo is None or not isinstance(failure, dynamo.TorchDynamoException):
            raise
        raise error(
            f"{setting} could not compile the model: {type(failure).__name__}: {_summarize(str(failure))}; "
            f"{setting.partition('=')[0]}=none needs no compilation"
        ) from failure


def _summarize(message: str) -> str:
    """Return the first line of ``message`` with any introductory lines ("backend='inductor' raised:"), and the first
    compiler error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first = next((count for count, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    compiler_error = next(([line] for line in lines[first:] if "error: " in line), [])
    return " ".join([*lines[:first], *compiler_error]) or "no message"


@contextmanager
def forbid_compilation() -> Iterator[None]:
    """Forbid compilation inside the context. Compiled code may run.

    Raises:
        CaptureError: code needed a compilation.
    """
    with torch.compiler.set_stance("fail_on_recompile"):
        try:
            yield
        except RuntimeError as failure:
            if "fail_on_recompile" not in str(failure):
                raise
            raise CaptureError(f"the capture needs code that the warm-up has not compiled: {failure}") from failure
