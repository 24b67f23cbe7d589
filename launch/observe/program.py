"""Describe the program: its command, its code and its packages, beside what every run describes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from launch.common.redact import redact
from launch.contract.spec import RunSpec
from launch.contract.spec_ids import digest
from launch.frameworks.command_line import command_words
from launch.train.telemetry.provenance import describe, run_git


def describe_program(device: torch.device, spec: RunSpec, folders: Sequence[str]) -> dict[str, Any]:
    """Return the content of environment.json. Packages are those in ``folders``: libraries add to sys.path later. Its data is what the command names, of which nothing else is known."""
    shared = digest([*spec.command.flags, spec.command.run])
    described = describe(device, shared, None)
    packages = dict(
        sorted((found.name, found.version) for found in metadata.distributions(path=list(folders)) if found.name)
    )
    code = _code(Path(spec.command.workdir))
    words = [redact(word) for word in command_words(spec, {})]
    return {
        **described,
        "program": {"framework": spec.command.framework, "command": " ".join(words), "python": redact(sys.executable)},
        "code": code,
        "digests": {"code": code["digest"], "libraries": digest([described["versions"], packages])},
        "packages": packages,
    }


def _code(folder: Path) -> dict[str, Any]:
    """Return commit and changes of the checkout that ``folder`` is in, and a digest of both; elsewhere of its Python files."""
    commit = run_git(folder, "rev-parse", "HEAD")
    content = hashlib.sha256((commit or "").encode())
    changes = ""
    if commit is not None:
        changes = run_git(folder, "diff", "HEAD") or ""
        content.update(changes.encode())
    for path in _untracked(folder) if commit is not None else sorted(folder.glob("*.py")):
        content.update(path.name.encode() + b"\0" + path.read_bytes())
    return {"commit": commit, "dirty": bool(changes), "digest": content.hexdigest()[:10]}


def _untracked(folder: Path) -> Iterator[Path]:
    listed = run_git(folder, "ls-files", "--others", "--exclude-standard", "--", "*.py") or ""
    return (path for name in listed.splitlines() if (path := folder / name).is_file())
