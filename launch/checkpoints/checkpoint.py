"""Check a checkpoint in the Hugging Face layout against the model of a recipe, before any tensor is read.

Nothing here imports torch, so a login node can find the problems for which a job would refuse the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.checkpoints.config_check import config_mismatches
from launch.checkpoints.digest import digest_of, digest_of_all
from launch.checkpoints.parameter_map import MXFP4_BLOCK, Entry, Expected, architecture_of, shape_mismatches, table
from launch.checkpoints.safetensors_header import Tensor, read_object
from launch.checkpoints.shards import COPY_AGAIN, Files, problem, read_files, shortened, tensor_problem, unreadable
from launch.contract.errors import CheckpointError
from launch.contract.plan import Reason
from launch.contract.spec import Model

FLOATING = ("F64", "F32", "F16", "BF16")
BYTES = ("U8",)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

FIT = "set the model section to what the checkpoint was trained with, or name another checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """The source of a decoder's weights: its parameters, and the place of each tensor."""

    path: str
    """The path as the recipe has it."""
    entries: tuple[Entry, ...]
    tensors: Mapping[str, Tensor]
    has_config: bool
    """Whether the checkpoint has a config.json. Without one, values that shapes do not show are not checked: heads, rotary
    positions, windows, the epsilon of norms, the choice of experts."""

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal digits, of every tensor (:func:`launch.checkpoints.digest.digest_of`).

        Raises:
            CheckpointError: a file can no longer be read.
        """
        try:
            return digest_of_all(self.tensors)
        except OSError as error:
            raise checkpoint_error(self.path, [unreadable(Path(error.filename or self.path).name, error)]) from error

    def not_finite(self, names: Sequence[str], precision: str) -> CheckpointError:
        """Return the error for tensors with NaN or infinite numbers when read in ``precision``."""
        found = f"NaN or infinite numbers, read in {precision}, in {shortened(names)}"
        return checkpoint_error(self.path, [problem(found, f"{COPY_AGAIN}, or name another checkpoint")])


def open_checkpoint(model: Model) -> Checkpoint:
    """Open the checkpoint at ``model.weights``. Only headers, config.json and a tied head are read.

    Raises:
        CheckpointError: it cannot be read, or it belongs to another model. The message lists every problem.
    """
    if "\0" in model.weights:
        raise checkpoint_error(model.weights, [problem("a path cannot hold a NUL character", "correct the path")])
    if unfit := shape_mismatches(model):
        unsupported = problem(
            f"a checkpoint of this model needs the layout of {architecture_of(model).name}, "
            f"which does not support: {'; '.join(unfit)}",
            "set these fields, or model.weights=random",
        )
        raise checkpoint_error(model.weights, [unsupported])
    path = Path(model.weights)
    files = read_files(path)
    packed = any(name.endswith("_blocks") for name in files.tensors)
    entries = table(model, packed)
    config, config_problems = _read_config(path)
    problems = [
        *files.problems,
        *_tensor_problems(model, entries, files, packed),
        *_tie_problems(model, files),
        *config_problems,
    ]
    problems += [problem(text, FIT) for text in config_mismatches(model, config or {})]
    if problems:
        raise checkpoint_error(model.weights, problems)
    return Checkpoint(model.weights, entries, files.tensors, has_config=config is not None)


def checkpoint_error(path: str, problems: Sequence[Reason]) -> CheckpointError:
    found = "; ".join(reason.message for reason in problems)
    remedies = "; ".join(dict.fromkeys(reason.remedy for reason in problems))
    return CheckpointError(f"model.weights={path!r}: {found}; {remedies}")


def _tensor_problems(model: Model, entries: tuple[Entry, ...], files: Files, packed: bool) -> Iterator[Reason]:
    if files.problems and not files.tensors:
        # Nothing could be read. Do not report all tensors as missing, because that would hide the cause.
        return
    expected = {tensor.name: tensor for entry in entries for tensor in entry.tensors}
    missing = [name for name in expected if name not in files.tensors and name not in files.unread]
    yield from tensor_problem("missing tensors", missing, FIT)
    surplus = [name for name in files.tensors if name not in expected and not _ignored(name, model)]
    yield from tensor_problem("surplus tensors", surplus, FIT)
    wrong = [
        f"{name} is {list(found.shape)} {found.dtype}, not {list(tensor.shape)} {'U8' if tensor.packed else 'floating-point'}"
        for name, tensor in expected.items()
        if (found := files.tensors.get(name)) and not _fits(tensor, found)
    ]
    yield from tensor_problem("tensors of another shape or type", wrong, FIT)
    if packed and (model.hidden_size % MXFP4_BLOCK or model.moe_ffn_hidden_size % MXFP4_BLOCK):
        sizes = f"model.hidden_size={model.hidden_size} and model.moe_ffn_hidden_size={model.moe_ffn_hidden_size}"
        yield problem(f"experts in MXFP4 come in blocks of {MXFP4_BLOCK}, but {sizes}", FIT)


def _ignored(name: str, model: Model) -> bool:
    """Return whether a surplus tensor is harmless: RoPE frequencies in old Llama files, or a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (model.tie_embeddings and name == HEAD)


def _tie_problems(model: Model, files: Files) -> Iterator[Reason]:
    head, embedding = files.tensors.get(HEAD), files.tensors.get(EMBEDDING)
    if not model.tie_embeddings or head is None or embedding is None:
        return
    try:
        same = digest_of(head) == digest_of(embedding)
    except OSError as error:
        yield unreadable(Path(error.filename or head.file).name, error)
        return
    if not same:
        yield problem(
            f"model.tie_embeddings=true, but {HEAD} differs from {EMBEDDING}", "set model.tie_embeddings=false"
        )


def _fits(expected: Expected, found: Tensor) -> bool:
    return found.shape == expected.shape and found.dtype in (BYTES if expected.packed else FLOATING)


def _read_config(path: Path) -> tuple[dict[str, Any] | None, tuple[Reason, ...]]:
    """Read a checkpoint's config.json. Return None for it if it is missing or cannot be read."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    try:
        return read_object(file), ()
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError) as error:
        return None, (unreadable(file.name, error),)
