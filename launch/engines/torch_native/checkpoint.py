"""Weights from a checkpoint in the Hugging Face layout, read into a decoder one parameter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launch.errors import EnvironmentFault
from launch.hugging_face.checkpoint import Checkpoint, open_checkpoint
from launch.hugging_face.layout import Entry
from launch.spec import Model

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1 by its four bits, the sign first (OCP Microscaling Formats 1.0, section 5.3.3)."""
E8M0_BIAS = 127

Open = Callable[[str], Any]
"""A tensor's name -> its safetensors slice, of which an index reads a part."""


@torch.no_grad()
def load_weights(decoder: nn.Module, model: Model) -> None:
    """Fill every parameter of ``decoder``, in its own precision and on its own device.

    No more is held beside the decoder than the tensors of one parameter.

    Raises:
        CheckpointError: the checkpoint cannot be read, or is not one of ``model``.
        EnvironmentFault: the safetensors package is not installed.
    """
    checkpoint = open_checkpoint(model)
    parameters = dict(decoder.named_parameters())
    assert set(parameters) == {entry.parameter for entry in checkpoint.entries}
    with _opened(checkpoint) as tensors:
        for entry in checkpoint.entries:
            _fill(parameters[entry.parameter], entry, tensors)


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 numbers of uint8 ``blocks`` (..., blocks, 16) and ``scales`` (..., blocks): (..., 32 * blocks).

    A byte holds two E2M1 numbers, the first in its low half; a scale is the exponent of two, plus 127
    (OCP Microscaling Formats 1.0, section 5).
    """
    values = torch.tensor(FP4_VALUES, device=blocks.device)
    numbers = torch.stack((values[(blocks & 0xF).int()], values[(blocks >> 4).int()]), dim=-1)
    scaled = torch.ldexp(numbers.flatten(-2), scales.int().unsqueeze(-1) - E8M0_BIAS)
    return scaled.flatten(-2)


@contextmanager
def _opened(checkpoint: Checkpoint) -> Iterator[Open]:
    """Files are mapped into memory as they are needed, each once."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        message = f"model.weights needs the safetensors package ({error}): pip install safetensors"
        raise EnvironmentFault(message) from error
    files: dict[Path, Any] = {}
    with ExitStack() as stack:

        def tensor(name: str) -> Any:
            path = checkpoint.files[name]
            if path not in files:
                files[path] = stack.enter_context(safe_open(path, framework="pt"))
            return files[path].get_slice(name)

        yield tensor


def _fill(parameter: torch.Tensor, entry: Entry, tensors: Open) -> None:
    names = [tensor.name for tensor in entry.tensors]
    if entry.form == "rows":
        parameter.copy_(torch.cat([tensors(name)[:] for name in names]))
    elif entry.form == "interleaved":
        parameter.copy_(_halves(tensors(names[0])[:]))
    elif entry.form == "experts":
        share = len(names) // len(parameter)
        for number, expert in enumerate(parameter):
            rows = [tensors(name)[:] for name in names[number * share : (number + 1) * share]]
            expert.copy_(torch.cat(rows).T)
    else:
        blocks, scales = (tensors(name) for name in names)
        for number, expert in enumerate(parameter):
            inputs_last = unpack_mxfp4(blocks[number].to(expert.device), scales[number].to(expert.device))
            expert.copy_(_halves(inputs_last.T) if entry.form == "packed_interleaved" else inputs_last.T)


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """(..., gate, up, gate, up) -> (..., gate, gate, up, up)."""
    return torch.cat((pairs[..., ::2], pairs[..., 1::2]), dim=-1)
