"""Model and loss compiled as one function, forward and backward, by Inductor, and what goes with such compilation.

With ``training.compile: whole`` every step runs that function, and with ``cuda_graph.impl: torch_compile`` those from the
capture on, in CUDA graphs of Inductor's own. Nothing here loads Dynamo before something is compiled: it takes as long as
all the rest of torch.
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
    """Runs a decoder that is the whole model, compiled for the shapes that it meets.

    Args:
        how: the mode or the backend of ``torch.compile``; by default Inductor without CUDA graphs.
    """

    def __init__(self, decoder: Decoder, **how: Any) -> None:
        self._run = torch.compile(decoder, fullgraph=True, dynamic=False, **how)
        self.compilations = 0
        """Of this function alone: its forward pass is compiled within a call, its backward pass with that pass's first run."""

    def __call__(self, tokens: torch.Tensor, observe: ObserveOutput) -> Losses:
        before = _compiled_frames()
        losses: Losses = self._run(tokens, observe)
        self.compilations += _compiled_frames() - before
        return losses

    @property
    def recompilations(self) -> int:
        return max(0, self.compilations - 1)


def _compiled_frames() -> int:
    """How many functions Dynamo has compiled in this process, those compiled anew counted again."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def disable_kernel_timing() -> None:
    """Have Inductor choose by rules among kernels that round differently, and not by timing them on the device."""
    from torch._inductor import config

    config.deterministic = True


@contextmanager
def compile_errors_as(setting: str, error: type[OrchestratorError]) -> Iterator[None]:
    """Raises ``error``, which names ``setting``, where Dynamo or Inductor fails within it."""
    try:
        yield
    except RuntimeError as failure:
        dynamo = sys.modules.get("torch._dynamo.exc")
        if dynamo is None or not isinstance(failure, dynamo.TorchDynamoException):
            raise
        raise error(
            f"{setting} could not compile the model: {type(failure).__name__}: {_summarize(str(failure))}; "
            f"{setting.partition('=')[0]}=none does without"
        ) from failure


def _summarize(message: str) -> str:
    """Its first line; where that only announces another ("backend='inductor' raised:") that one too, and the first error that
    a compiler told."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = next((place for place, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    of_compiler = next(([line] for line in lines[told:] if "error: " in line), [])
    return " ".join([*lines[:told], *of_compiler]) or "no message"


@contextmanager
def forbid_compilation() -> Iterator[None]:
    """Within it compiled code runs, and none is compiled.

    Raises:
        CaptureError: something had to be.
    """
    with torch.compiler.set_stance("fail_on_recompile"):
        try:
            yield
        except RuntimeError as failure:
            if "fail_on_recompile" not in str(failure):
                raise
            raise CaptureError(
                f"what is captured was to be compiled in the capture, and not in the warm-up: {failure}"
            ) from failure
