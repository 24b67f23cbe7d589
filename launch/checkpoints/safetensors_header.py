"""What a safetensors file holds, from its header alone: no tensor is read, and no library is used.

The format: eight bytes of length, little-endian, a JSON object of that length, and the tensors' bytes, one tensor
behind the other (https://github.com/huggingface/safetensors#format). What the library refuses is refused here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTH_BYTES = 8
LIMIT = 100_000_000
"""Bytes of the longest header that the library reads (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""

BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Of one element of each type (safetensors/src/tensor.rs, Dtype::bitsize)."""


@dataclass(frozen=True)
class Tensor:
    """``dtype`` as safetensors spells it: F64, F32, BF16, U8. Its ``size`` bytes begin at byte ``start`` of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    size: int


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ValueError: there is none.
        OSError: the file cannot be read.
    """
    return _object(path.read_bytes())


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name.

    Raises:
        ValueError: it is no safetensors file, or its tensors do not fill it from the header to its end.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        begin = LENGTH_BYTES + length
        if size < LENGTH_BYTES or begin > size:
            raise ValueError(f"no safetensors header fits into its {size} bytes")
        if length > LIMIT:
            raise ValueError(f"its header has {length} bytes, and {LIMIT} at most are read")
        content = _object(file.read(length))
    if not _is_metadata(content.pop("__metadata__", None)):
        raise ValueError("its __metadata__ does not map names to texts")
    tensors = {name: _tensor(path, begin, name, described) for name, described in content.items()}
    _check_places(tensors, begin, size)
    return tensors


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _is_metadata(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(isinstance(text, str) for text in value.values()))


def _tensor(path: Path, begin: int, name: str, described: Any) -> Tensor:
    match described:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]}:
            counts = (*shape, start, end)
        case _:
            raise ValueError(f"its header does not give the dtype, shape and data_offsets of {name!r}")
    if dtype not in BITS:
        raise ValueError(f"{name!r} is of the type {dtype!r}, which safetensors does not have")
    # bool is a kind of int, but true is no size
    if not all(type(count) is int and 0 <= count < 1 << 63 for count in counts):
        raise ValueError(f"shape and data_offsets of {name!r} are not whole numbers from 0 on")
    bits = math.prod(shape) * BITS[dtype]
    if bits != (end - start) * 8:
        raise ValueError(f"{name!r} has {end - start} bytes, but {shape} {dtype} takes {bits / 8:g}")
    return Tensor(path, tuple(shape), dtype, begin + start, end - start)


def _check_places(tensors: Mapping[str, Tensor], begin: int, size: int) -> None:
    """The tensors must lie one behind the other, from the end of the header to the end of the file."""
    end = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if tensor.start != end:
            raise ValueError(f"{name!r} begins at byte {tensor.start}, but what lies before it ends at {end}")
        end += tensor.size
    if size != end:
        raise ValueError(f"{size} bytes long, but its header speaks of {end}")
