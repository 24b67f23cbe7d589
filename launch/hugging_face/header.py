"""What the safetensors files of a checkpoint hold, from their headers alone: no tensor is read, and no library is used.

The format: eight bytes of length, little-endian, a JSON object of that length, and the tensors' bytes
(https://github.com/huggingface/safetensors#format). The index of a checkpoint in shards maps names to files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8


class Fault(NamedTuple):
    """One thing that is wrong with a checkpoint, and the way out."""

    found: str
    remedy: str


@dataclass(frozen=True)
class Tensor:
    """``dtype`` as safetensors spells it: F64, F32, BF16, U8."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Files:
    """All that could be read. ``unread`` are the tensors that the index puts into files at fault."""

    tensors: Mapping[str, Tensor]
    faults: tuple[Fault, ...] = ()
    unread: frozenset[str] = frozenset()


def read_files(path: Path) -> Files:
    """The tensors of ``path``: a .safetensors file, or a folder that holds model.safetensors or shards with an index.

    As in transformers, model.safetensors comes before the index where a folder holds both.
    """
    try:
        names = {file.name for file in path.iterdir()} if path.is_dir() else None
    except OSError as error:
        return Files({}, (unreadable("the folder", error),))
    if names is None:
        return _read_single(path)
    if SINGLE in names:
        return _read_single(path / SINGLE)
    if INDEX in names:
        return _read_shards(path)
    remedy = "pickled .bin files are not read: write the checkpoint anew with save_pretrained"
    return Files({}, (Fault(f"the folder holds neither {SINGLE} nor {INDEX}", remedy),))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        ValueError: there is none.
        OSError: the file cannot be read.
    """
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def unreadable(name: str, error: OSError | ValueError) -> Fault:
    """The fault of a file or folder. What ``error`` says of paths is left out: they may be private."""
    if isinstance(error, OSError):
        remedy = "give the job's user the right to read it, or name another path"
        return Fault(f"{name} cannot be read ({error.strerror})", remedy)
    return Fault(f"{name} is damaged ({error})", "copy or download it again")


def _read_single(path: Path) -> Files:
    try:
        return Files(_read_header(path))
    except FileNotFoundError:
        remedy = f"name a folder that holds {SINGLE} or {INDEX}, or a .safetensors file"
        return Files({}, (Fault(f"{path.name} is not there", remedy),))
    except (OSError, ValueError) as error:
        return Files({}, (unreadable(path.name, error),))


def _read_shards(folder: Path) -> Files:
    try:
        shards = _weight_map(folder / INDEX)
    except (OSError, ValueError) as error:
        return Files({}, (unreadable(INDEX, error),))
    tensors: dict[str, Tensor] = {}
    broken: dict[str, Fault] = {}
    for shard in sorted(set(shards.values())):
        try:
            tensors |= _read_header(folder / shard)
        except FileNotFoundError:
            broken[shard] = Fault(f"{shard}, which {INDEX} names, is not there", "copy or download it again")
        except (OSError, ValueError) as error:
            broken[shard] = unreadable(shard, error)
    unread = frozenset(name for name, shard in shards.items() if shard in broken)
    return Files(tensors, tuple(broken.values()), unread)


def _weight_map(path: Path) -> dict[str, str]:
    shards = read_object(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ValueError("its weight_map does not map names to files")
    return shards


def _read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one file.

    Raises:
        ValueError: it is no safetensors file, or shorter than its header says.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or LENGTH_BYTES + length > size:
            raise ValueError(f"no safetensors header fits into its {size} bytes")
        content = json.loads(file.read(length))
    try:
        header = {name: value for name, value in content.items() if name != "__metadata__"}
        tensors = {name: Tensor(path, tuple(value["shape"]), value["dtype"]) for name, value in header.items()}
        end = LENGTH_BYTES + length + max((value["data_offsets"][1] for value in header.values()), default=0)
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError("its header is not that of a safetensors file") from error
    if size < end:
        raise ValueError(f"{size} bytes long, but its header speaks of {end}")
    return tensors
