"""A checkpoint in the Hugging Face layout, checked whole against the model that a recipe describes, before it is read.

Nothing here imports torch: a login node can tell what a job would refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.checkpoints.config_check import config_mismatches
from launch.checkpoints.digest import digest_of, digest_of_all
from launch.checkpoints.parameter_map import MXFP4_BLOCK, Entry, Expected, architecture_of, shape_mismatches, table
from launch.checkpoints.problem import COPY_AGAIN, CheckpointProblem, shortened, unreadable
from launch.checkpoints.safetensors_header import Tensor, read_object
from launch.checkpoints.shards import Files, read_files
from launch.contract.errors import CheckpointError
from launch.contract.spec import Model

FLOATING = ("F64", "F32", "F16", "BF16")
BYTES = ("U8",)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

FIT = "set the model section to what the checkpoint was trained with, or name another checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """What fills a decoder: each of its parameters, and where each tensor lies."""

    path: str
    """As the recipe wrote it."""
    entries: tuple[Entry, ...]
    tensors: Mapping[str, Tensor]
    has_config: bool
    """A config.json lies beside. Without one, what no shape tells is not checked: heads, rotary positions, windows, the
    epsilon of norms, how experts are chosen."""

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal digits, of every tensor as :func:`launch.checkpoints.digest.digest_of` takes it.

        Raises:
            CheckpointError: a file can no longer be read.
        """
        try:
            return digest_of_all(self.tensors)
        except OSError as error:
            raise checkpoint_error(self.path, [unreadable(Path(error.filename or self.path).name, error)]) from error

    def not_finite(self, names: Sequence[str], precision: str) -> CheckpointError:
        """The refusal of tensors that hold NaN or infinity where they are read in ``precision``."""
        found = f"NaN or infinite numbers, read in {precision}, in {shortened(names)}"
        return checkpoint_error(self.path, [CheckpointProblem(found, f"{COPY_AGAIN}, or name another checkpoint")])


def open_checkpoint(model: Model) -> Checkpoint:
    """The checkpoint at ``model.weights``: its headers and config.json are read, and no tensor but a head that must
    equal the embedding.

    Raises:
        CheckpointError: it cannot be read, or is not one of ``model``; the message holds all that was found.
    """
    if "\0" in model.weights:
        raise checkpoint_error(model.weights, [CheckpointProblem("no path holds a NUL character", "mend the path")])
    if unfit := shape_mismatches(model):
        fault = CheckpointProblem(
            f"a checkpoint of such a model is read in the layout of {architecture_of(model).name}, "
            f"which does not have: {'; '.join(unfit)}",
            "set these fields, or model.weights=random",
        )
        raise checkpoint_error(model.weights, [fault])
    path = Path(model.weights)
    files = read_files(path)
    packed = any(name.endswith("_blocks") for name in files.tensors)
    entries = table(model, packed)
    config, config_faults = _read_config(path)
    faults = [*files.faults, *_tensor_faults(model, entries, files, packed), *_tie_faults(model, files), *config_faults]
    faults += [CheckpointProblem(text, FIT) for text in config_mismatches(model, config or {})]
    if faults:
        raise checkpoint_error(model.weights, faults)
    return Checkpoint(model.weights, entries, files.tensors, has_config=config is not None)


def checkpoint_error(path: str, faults: Sequence[CheckpointProblem]) -> CheckpointError:
    found = "; ".join(fault.found for fault in faults)
    remedies = "; ".join(dict.fromkeys(fault.remedy for fault in faults))
    return CheckpointError(f"model.weights={path!r}: {found}; {remedies}")


def _tensor_faults(model: Model, entries: tuple[Entry, ...], files: Files, packed: bool) -> Iterator[CheckpointProblem]:
    if files.faults and not files.tensors:
        return  # nothing could be read: to call all tensors missing would bury the cause
    expected = {tensor.name: tensor for entry in entries for tensor in entry.tensors}
    missing = [name for name in expected if name not in files.tensors and name not in files.unread]
    if missing:
        yield CheckpointProblem(f"missing tensors ({len(missing)}): {shortened(missing)}", FIT)
    surplus = [name for name in files.tensors if name not in expected and not _ignored(name, model)]
    if surplus:
        yield CheckpointProblem(f"surplus tensors ({len(surplus)}): {shortened(surplus)}", FIT)
    wrong = [
        f"{name} is {_spelt(files.tensors[name])}, not {_wanted(tensor)}"
        for name, tensor in expected.items()
        if name in files.tensors and not _fits(tensor, files.tensors[name])
    ]
    if wrong:
        yield CheckpointProblem(f"tensors of another shape or type ({len(wrong)}): {shortened(wrong)}", FIT)
    if packed and (model.hidden_size % MXFP4_BLOCK or model.moe_ffn_hidden_size % MXFP4_BLOCK):
        sizes = f"model.hidden_size={model.hidden_size} and model.moe_ffn_hidden_size={model.moe_ffn_hidden_size}"
        yield CheckpointProblem(f"experts in MXFP4 come in blocks of {MXFP4_BLOCK}, but {sizes}", FIT)


def _ignored(name: str, model: Model) -> bool:
    """Old checkpoints of Llama hold the frequencies of RoPE; some with tied embeddings hold the head a second time."""
    return name.endswith("rotary_emb.inv_freq") or (model.tie_embeddings and name == HEAD)


def _tie_faults(model: Model, files: Files) -> Iterator[CheckpointProblem]:
    head, embedding = files.tensors.get(HEAD), files.tensors.get(EMBEDDING)
    if not model.tie_embeddings or head is None or embedding is None:
        return
    try:
        same = digest_of(head) == digest_of(embedding)
    except OSError as error:
        yield unreadable(Path(error.filename or head.file).name, error)
        return
    if not same:
        yield CheckpointProblem(
            f"model.tie_embeddings=true, but {HEAD} differs from {EMBEDDING}", "set model.tie_embeddings=false"
        )


def _fits(expected: Expected, found: Tensor) -> bool:
    return found.shape == expected.shape and found.dtype in (BYTES if expected.packed else FLOATING)


def _spelt(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _wanted(expected: Expected) -> str:
    return f"{list(expected.shape)} {'U8' if expected.packed else 'floating-point'}"


def _read_config(path: Path) -> tuple[dict[str, Any] | None, tuple[CheckpointProblem, ...]]:
    """The config.json beside a checkpoint, None where there is none or it cannot be read."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    try:
        return read_object(file), ()
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError) as error:
        return None, (unreadable(file.name, error),)
