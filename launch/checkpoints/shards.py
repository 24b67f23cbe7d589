"""The files of a checkpoint: one file, or shards with an index that maps each tensor to its file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launch.checkpoints.safetensors_header import Tensor, read_header, read_object
from launch.common.text import listed
from launch.contract.plan import Reason

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
REWRITE = "rewrite the checkpoint with save_pretrained"
COPY_AGAIN = "copy or download it again"
SHOWN = 8
"""The number of items that a message lists before it counts the rest."""

problem = partial(Reason, "checkpoint")
"""Makes the reason why a checkpoint cannot be used, from a message and its fix."""


@dataclass(frozen=True)
class Files:
    """Everything that could be read. ``unread`` has the tensors that the index places in unreadable files."""

    tensors: Mapping[str, Tensor]
    problems: tuple[Reason, ...] = ()
    unread: frozenset[str] = frozenset()


def read_files(path: Path) -> Files:
    """Read the headers at ``path``: a .safetensors file, or a folder with model.safetensors or shards with an index.

    As in transformers, model.safetensors takes precedence over the index.
    """
    if not path.is_dir():
        return _read_headers(path.parent, {path.name})
    try:
        names = set(os.listdir(path))
    except OSError as error:
        return Files({}, (unreadable("the folder", error),))
    if SINGLE in names:
        return _read_headers(path, {SINGLE})
    if INDEX not in names:
        found = f"the folder holds neither {SINGLE} nor {INDEX}"
        return Files({}, (problem(found, f"pickled .bin files are not read: {REWRITE}"),))
    try:
        shards = _weight_map(path / INDEX)
    except (OSError, ValueError) as error:
        return Files({}, (unreadable(INDEX, error),))
    return _read_headers(path, set(shards.values()), shards)


def _read_headers(folder: Path, files: Set[str], shards: Mapping[str, str] | None = None) -> Files:
    """Read the headers of ``files``. ``shards`` is the index, from tensors to files, or None if there is none."""
    tensors: dict[str, Tensor] = {}
    holders: dict[str, list[str]] = {}
    broken: dict[str, Reason] = {}
    for file in sorted(files):
        try:
            header = read_header(folder / file)
        except FileNotFoundError:
            broken[file] = _missing(file, indexed=shards is not None)
        except (OSError, ValueError) as error:
            broken[file] = unreadable(file, error)
        else:
            tensors |= header
            for name in header:
                holders.setdefault(name, []).append(file)
    index = shards or {}
    unread = frozenset(name for name, file in index.items() if file in broken)
    return Files(tensors, (*broken.values(), *_misplaced(index, holders)), unread)


def _missing(file: str, *, indexed: bool) -> Reason:
    if indexed:
        return problem(f"{file}, which {INDEX} names, is not there", COPY_AGAIN)
    return problem(f"{file} is not there", f"name a folder that holds {SINGLE} or {INDEX}, or a .safetensors file")


def unreadable(name: str, error: OSError | ValueError) -> Reason:
    """Return the problem of a file or folder without the paths in ``error``, which may be private."""
    if isinstance(error, OSError):
        fix = "give the job's user the right to read it, or name another path"
        return problem(f"{name} cannot be read ({error.strerror})", fix)
    return problem(f"{name} is damaged ({error})", COPY_AGAIN)


def tensor_problem(what: str, tensors: Collection[str], remedy: str) -> Iterator[Reason]:
    """Yield the problem that ``what`` are ``tensors``, if there are any."""
    if tensors:
        yield problem(f"{what} ({len(tensors)}): {shortened(tensors)}", remedy)


def shortened(items: Collection[str]) -> str:
    """Return the first of ``items`` and the number of the rest: "a, b and 2 more"."""
    return listed(list(items), SHOWN)


def _weight_map(path: Path) -> dict[str, str]:
    shards = read_object(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ValueError("its weight_map does not map names to files")
    astray = [shard for shard in shards.values() if shard != Path(shard).name or shard in ("", "..")]
    if astray:
        raise ValueError(f"its weight_map names {astray[0]!r}, which is not a file of its folder")
    return shards


def _misplaced(shards: Mapping[str, str], holders: Mapping[str, list[str]]) -> Iterator[Reason]:
    """Yield problems with tensors that are in several files, or in a different file than the index says."""
    twice = [f"{name} in {' and '.join(files)}" for name, files in holders.items() if len(files) > 1]
    yield from tensor_problem("tensors in more than one file", twice, REWRITE)
    astray = [
        f"{name} in {files[0]}, not {shards[name]}"
        for name, files in holders.items()
        if len(files) == 1 and shards.get(name, files[0]) != files[0]
    ]
    yield from tensor_problem(f"tensors in a different file than {INDEX} says", astray, REWRITE)
