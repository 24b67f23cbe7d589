"""The tensors of a safetensors file, read from its header.

The library checks the file. It does not say where a tensor's bytes begin, which a digest needs. The header says it
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from launch.common.atomic_files import parse_json
from launch.common.regular_file import open_regular, read_regular

LENGTH_BYTES = 8


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file. ``dtype`` has safetensors' spelling: F64, F32, BF16, U8. ``size`` and ``start`` are in bytes."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    size: int


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in ``path``.

    Raises:
        ValueError: the file does not hold a JSON object.
        OSError: the file cannot be read.
    """
    value = parse_json(read_regular(path))
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file by name.

    Raises:
        ValueError: the safetensors library refuses the file.
        OSError: the file cannot be read.
    """
    # Open the file here first, because the library reports a folder as an unknown device, and waits for the writer of a FIFO.
    with open_regular(path) as file:
        try:
            with safe_open(path, framework="np"):
                pass
        except SafetensorError as error:
            raise ValueError(str(error).removeprefix("Error while deserializing header: ")) from error
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        content = parse_json(file.read(length))
    content.pop("__metadata__", None)
    first = LENGTH_BYTES + length
    return {name: _tensor(path, first, **described) for name, described in content.items()}


def _tensor(path: Path, first: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    start, end = data_offsets
    return Tensor(path, tuple(shape), dtype, first + start, end - start)
