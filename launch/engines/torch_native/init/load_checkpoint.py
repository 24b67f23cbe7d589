"""Weights from a checkpoint in the Hugging Face layout, loaded one parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launch.checkpoints.checkpoint import Checkpoint, open_checkpoint
from launch.checkpoints.parameter_map import Entry
from launch.engines.packages import import_package
from launch.engines.torch_native.init.initial_weights import named_weights
from launch.engines.torch_native.layers.build_context import BuildContext
from launch.engines.torch_native.parallel.sharding import Sharding

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The E2M1 number for each value of four bits, sign first (OCP Microscaling Formats 1.0, section 5.3.3)."""
E8M0_BIAS, E8M0_NAN = 127, 255

Open = Callable[[str], Any]
"""Takes a tensor's name and returns its safetensors slice. Indexing the slice reads that part of the file."""


@torch.no_grad()
def load_weights(decoder: nn.Module, context: BuildContext) -> None:
    """Fill every parameter of ``decoder``, or this rank's part of it, in the parameter's precision and on its device.

    This takes at most as much additional memory as the tensors of one parameter.

    Raises:
        CheckpointError: the checkpoint is unreadable, of another model, or has numbers that are not finite.
        EnvironmentFault: the safetensors package is not installed.
    """
    checkpoint = open_checkpoint(context.model)
    entries = {entry.parameter: entry for entry in checkpoint.entries}
    with _open_tensors(checkpoint) as tensors:
        for name, (parameter, sharding) in named_weights(decoder, context.model).items():
            _fill(parameter, entries[name], tensors, sharding, context)
            # aminmax propagates NaN and allocates no memory of the parameter's size.
            if not torch.stack(parameter.aminmax()).isfinite().all():
                names = _not_finite(entries[name], tensors, parameter.dtype)
                raise checkpoint.not_finite(names, str(parameter.dtype).removeprefix("torch."))


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 ``blocks`` (..., blocks, 16) and ``scales`` (..., blocks) to float32 (..., 32 * blocks).

    A byte holds two E2M1 numbers, the first in its low half. A scale is an exponent of two plus 127; 255 is NaN (OCP
    Microscaling Formats 1.0, section 5).
    """
    values = torch.tensor(FP4_VALUES, device=blocks.device)
    numbers = torch.stack((values[(blocks & 0xF).int()], values[(blocks >> 4).int()]), dim=-1)
    scaled = torch.ldexp(numbers.flatten(-2), scales.int().unsqueeze(-1) - E8M0_BIAS)
    return scaled.masked_fill_((scales == E8M0_NAN).unsqueeze(-1), math.nan).flatten(-2)


@contextmanager
def _open_tensors(checkpoint: Checkpoint) -> Iterator[Open]:
    """Yield a function that opens tensors. It maps each file into memory once, when first needed."""
    safetensors = import_package("safetensors", "safetensors", "model.weights", "pip install safetensors")
    files: dict[Path, Any] = {}
    with ExitStack() as stack:

        def tensor(name: str) -> Any:
            path = checkpoint.tensors[name].file
            if path not in files:
                files[path] = stack.enter_context(safetensors.safe_open(path, framework="pt"))
            return files[path].get_slice(name)

        yield tensor


def _fill(parameter: torch.Tensor, entry: Entry, tensors: Open, sharding: Sharding, context: BuildContext) -> None:
    """Copy this rank's part of the tensors of ``entry`` into ``parameter``."""
    names = [tensor.name for tensor in entry.tensors]
    group = context.ep if sharding.axis == "ep" else context.tp.group
    if entry.form == "rows":
        parameter.copy_(sharding.take(torch.cat([tensors(name)[:] for name in names]), group))
    elif entry.form == "interleaved":
        parameter.copy_(sharding.take(_halves(tensors(names[0])[:]), group))
    else:
        for number, expert in enumerate(parameter, start=group.rank * len(parameter)):
            matrix = _expert(entry, names, tensors, number, len(parameter) * group.size).to(expert.device)
            context.inputs_first(expert).copy_(matrix)


def _expert(entry: Entry, names: list[str], tensors: Open, number: int, experts: int) -> torch.Tensor:
    """Read the matrix of expert ``number``: (inputs, outputs)."""
    if entry.form == "experts":
        share = len(names) // experts
        return torch.cat([tensors(name)[:] for name in names[number * share : (number + 1) * share]]).T
    blocks, scales = (tensors(name) for name in names)
    inputs_first = unpack_mxfp4(blocks[number], scales[number]).T
    return _halves(inputs_first) if entry.form == "packed_interleaved" else inputs_first


def _not_finite(entry: Entry, tensors: Open, dtype: torch.dtype) -> list[str]:
    """Return the tensors of a parameter that are not finite. For MXFP4 return all, because its raw bytes are always finite."""
    names = [tensor.name for tensor in entry.tensors]
    return [name for name in names if not tensors(name)[:].to(dtype).isfinite().all()] or names


def _halves(pairs: torch.Tensor) -> torch.Tensor:
    """(..., gate, up, gate, up) -> (..., gate, gate, up, up)."""
    return torch.cat((pairs[..., ::2], pairs[..., 1::2]), dim=-1)
