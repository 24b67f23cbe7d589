"""The files of a checkpoint: one file, or shards with an index that maps each tensor to its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.checkpoints.problem import COPY_AGAIN, CheckpointProblem, shortened, unreadable
from launch.checkpoints.safetensors_header import Tensor, read_header, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
REWRITE = "rewrite the checkpoint with save_pretrained"


@dataclass(frozen=True)
class Files:
    """Everything that could be read. ``unread`` are tensors in files that could not be read, by the index."""

    tensors: Mapping[str, Tensor]
    problems: tuple[CheckpointProblem, ...] = ()
    unread: frozenset[str] = frozenset()


def read_files(path: Path) -> Files:
    """Read the headers at ``path``: a .safetensors file, or a folder with model.safetensors or shards with an index.

    As in transformers, model.safetensors takes precedence over the index.
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
    remedy = f"pickled .bin files are not read: {REWRITE}"
    return Files({}, (CheckpointProblem(f"the folder holds neither {SINGLE} nor {INDEX}", remedy),))


def _read_single(path: Path) -> Files:
    try:
        return Files(read_header(path))
    except FileNotFoundError:
        remedy = f"name a folder that holds {SINGLE} or {INDEX}, or a .safetensors file"
        return Files({}, (CheckpointProblem(f"{path.name} is not there", remedy),))
    except (OSError, ValueError) as error:
        return Files({}, (unreadable(path.name, error),))


def _read_shards(folder: Path) -> Files:
    try:
        shards = _weight_map(folder / INDEX)
    except (OSError, ValueError) as error:
        return Files({}, (unreadable(INDEX, error),))
    tensors: dict[str, Tensor] = {}
    holders: dict[str, list[str]] = {}
    broken: dict[str, CheckpointProblem] = {}
    for shard in sorted(set(shards.values())):
        try:
            header = read_header(folder / shard)
        except FileNotFoundError:
            broken[shard] = CheckpointProblem(f"{shard}, which {INDEX} names, is not there", COPY_AGAIN)
        except (OSError, ValueError) as error:
            broken[shard] = unreadable(shard, error)
        else:
            tensors |= header
            for name in header:
                holders.setdefault(name, []).append(shard)
    unread = frozenset(name for name, shard in shards.items() if shard in broken)
    return Files(tensors, (*broken.values(), *_misplaced(shards, holders)), unread)


def _weight_map(path: Path) -> dict[str, str]:
    shards = read_object(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ValueError("its weight_map does not map names to files")
    return shards


def _misplaced(shards: Mapping[str, str], holders: Mapping[str, list[str]]) -> Iterator[CheckpointProblem]:
    """Yield tensors whose file is ambiguous."""
    twice = [f"{name} in {' and '.join(files)}" for name, files in holders.items() if len(files) > 1]
    if twice:
        yield CheckpointProblem(f"tensors in more than one file ({len(twice)}): {shortened(twice)}", REWRITE)
    astray = [
        f"{name} in {files[0]}, not {shards[name]}"
        for name, files in holders.items()
        if len(files) == 1 and shards.get(name, files[0]) != files[0]
    ]
    if astray:
        yield CheckpointProblem(
            f"tensors in another file than {INDEX} says ({len(astray)}): {shortened(astray)}", REWRITE
        )
