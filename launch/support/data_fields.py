"""Rules on the data section: whether its fields fit each other and the vocabulary. A job checks them again."""

from __future__ import annotations

from launch.contract.spec import BYTE_VALUES, RunSpec
from launch.support.rule import UNPACKED, Rule


def _unused_fields(spec: RunSpec) -> list[str]:
    users = {"path": ("text", "indexed"), "tokenizer": ("text",)}
    unused = [
        name for name, kinds in users.items() if getattr(spec.data, name) is not None and spec.data.kind not in kinds
    ]
    return ["data.kind", *(f"data.{name}" for name in unused)] if unused else []


def _unusable_paths(spec: RunSpec) -> list[str]:
    paths = {"data.path": spec.data.path, "data.tokenizer": spec.data.tokenizer}
    return [name for name, path in paths.items() if path is not None and (not path or "\0" in path)]


RULES: tuple[Rule, ...] = (
    Rule(
        "data.unused_field", (), "only kinds text and indexed use a path, and only text uses a tokenizer",
        _unused_fields,
        fix="Leave the field out.",
        source="launch/data",
    ),
    Rule(
        "data.path", (), "a path must name a file: it cannot be empty or hold a NUL character",
        _unusable_paths,
        fix="Name a file.",
        source="POSIX, Pathname",
    ),
    Rule(
        "data.indexed_path", ("data.kind", "data.path"), "kind indexed reads the files PATH.bin and PATH.idx of data.path",
        lambda spec: spec.data.kind == "indexed" and spec.data.path is None,
        fix="Set data.path.",
        source="launch/data/indexed_dataset.py",
    ),
    Rule(
        "data.byte_tokens", ("data.kind", "data.tokenizer", "model.vocab_size"),
        f"text without a tokenizer turns each byte into a token and needs a vocabulary of {BYTE_VALUES}",
        lambda spec: spec.data.kind == "text" and spec.data.tokenizer is None and spec.model.vocab_size < BYTE_VALUES,
        fix=f"Set model.vocab_size={BYTE_VALUES} or more, or data.kind=synthetic.",
        source="launch/data/text_files.py",
    ),
    Rule(
        "data.eod_token", ("data.eod_token", "model.vocab_size"), "the end-of-document token must be in the vocabulary",
        lambda spec: spec.data.eod_token is not None and not 0 <= spec.data.eod_token < spec.model.vocab_size,
        fix="Set eod_token from 0 to vocab_size - 1, or raise model.vocab_size.",
        source="launch/data",
    ),
    Rule(
        "data.packing", ("data.packed_sequences", "data.eod_token"),
        "packed sequences need data.eod_token to find where documents end",
        lambda spec: spec.data.packed_sequences and spec.data.eod_token is None,
        fix=f"Set data.eod_token to the token that ends a document, or {UNPACKED}.",
        source="launch/engines/torch_native/layers/build_context.py",
    ),
    Rule(
        "data.max_documents", ("data.max_documents", "data.packed_sequences"),
        "only packed sequences have several documents",
        lambda spec: spec.data.max_documents is not None and not spec.data.packed_sequences,
        fix="Set data.packed_sequences=true, or data.max_documents=null.",
        source="launch/data",
    ),
)  # fmt: skip
