"""A checkpoint in the Hugging Face layout, checked whole against the model that a recipe describes, before it is read.

Nothing here imports torch: a login node can tell what a job would refuse.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.errors import CheckpointError
from launch.hugging_face.config import disagreements
from launch.hugging_face.header import Fault, Files, Tensor, read_files, read_object, unreadable
from launch.hugging_face.layout import MXFP4_BLOCK, Entry, Expected, architecture_of, misfits, table
from launch.sampled_digest import BLOCKS, sampled_digest
from launch.spec import Model

FLOATING = ("F64", "F32", "F16", "BF16")
BYTES = ("U8",)
SHOWN = 8
"""How many names a message lists before it counts the rest."""

FIT = "set the model section to what the checkpoint was trained with, or name another checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """What fills a decoder: each of its parameters, and the file that holds each tensor."""

    entries: tuple[Entry, ...]
    files: Mapping[str, Path]

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal digits, of the files as :func:`launch.sampled_digest` takes them: 64 blocks in
        all, and one of each where there are more files.

        Raises:
            OSError: a file can no longer be read.
        """
        files = sorted(set(self.files.values()))
        blocks = max(1, BLOCKS // len(files))
        return hashlib.sha256(" ".join(sampled_digest(file, blocks) for file in files).encode()).hexdigest()


def open_checkpoint(model: Model) -> Checkpoint:
    """The checkpoint at ``model.weights``: its headers and config.json are read, and no tensor.

    Raises:
        CheckpointError: it cannot be read, or is not one of ``model``; the message holds all that was found.
    """
    if unfit := misfits(model):
        fault = Fault(
            f"a checkpoint of such a model is read in the layout of {architecture_of(model).name}, "
            f"which does not have: {'; '.join(unfit)}",
            "set these fields, or model.weights=random",
        )
        raise _refusal(model, [fault])
    path = Path(model.weights)
    files = read_files(path)
    packed = any(name.endswith("_blocks") for name in files.tensors)
    entries = table(model, packed)
    faults = [*files.faults, *_tensor_faults(model, entries, files, packed), *_config_faults(model, path)]
    if faults:
        raise _refusal(model, faults)
    return Checkpoint(entries, {name: tensor.file for name, tensor in files.tensors.items()})


def _refusal(model: Model, faults: list[Fault]) -> CheckpointError:
    found = "; ".join(fault.found for fault in faults)
    remedies = "; ".join(dict.fromkeys(fault.remedy for fault in faults))
    return CheckpointError(f"model.weights={model.weights!r}: {found}; {remedies}")


def _tensor_faults(model: Model, entries: tuple[Entry, ...], files: Files, packed: bool) -> Iterator[Fault]:
    if files.faults and not files.tensors:
        return  # nothing could be read: to call all tensors missing would bury the cause
    expected = {tensor.name: tensor for entry in entries for tensor in entry.tensors}
    missing = [name for name in expected if name not in files.tensors and name not in files.unread]
    if missing:
        yield Fault(f"missing tensors ({len(missing)}): {_shortened(missing)}", FIT)
    surplus = [name for name in files.tensors if name not in expected and not _ignored(name, model)]
    if surplus:
        yield Fault(f"surplus tensors ({len(surplus)}): {_shortened(surplus)}", FIT)
    wrong = [
        f"{name} is {_spelt(files.tensors[name])}, not {_wanted(tensor)}"
        for name, tensor in expected.items()
        if name in files.tensors and not _fits(tensor, files.tensors[name])
    ]
    if wrong:
        yield Fault(f"tensors of another shape or type ({len(wrong)}): {_shortened(wrong)}", FIT)
    if packed and (model.hidden_size % MXFP4_BLOCK or model.moe_ffn_hidden_size % MXFP4_BLOCK):
        sizes = f"model.hidden_size={model.hidden_size} and model.moe_ffn_hidden_size={model.moe_ffn_hidden_size}"
        yield Fault(f"experts in MXFP4 come in blocks of {MXFP4_BLOCK}, but {sizes}", FIT)


def _ignored(name: str, model: Model) -> bool:
    """Old checkpoints of Llama hold the frequencies of RoPE; some with tied embeddings hold the head a second time."""
    return name.endswith("rotary_emb.inv_freq") or (model.tie_embeddings and name == "lm_head.weight")


def _fits(expected: Expected, found: Tensor) -> bool:
    return found.shape == expected.shape and found.dtype in (BYTES if expected.packed else FLOATING)


def _spelt(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _wanted(expected: Expected) -> str:
    return f"{list(expected.shape)} {'U8' if expected.packed else 'floating-point'}"


def _shortened(items: Collection[str]) -> str:
    shown = ", ".join(list(items)[:SHOWN])
    return f"{shown} and {len(items) - SHOWN} more" if len(items) > SHOWN else shown


def _config_faults(model: Model, path: Path) -> Iterator[Fault]:
    file = (path if path.is_dir() else path.parent) / "config.json"
    try:
        config = read_object(file)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield unreadable(file.name, error)
        return
    for text in disagreements(model, config):
        yield Fault(text, FIT)
