"""The code of this program or of a user's folder: commit, changes and digest, and the packages that a job imports."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from launch import ROOT

_NOT_OWN = {"site-packages", "node_modules"}
"""Folders with code of other projects."""
_SCRIPTS = (".py", ".sh")
_SETTINGS = (".yaml", ".yml", ".toml", ".ini", ".cfg")
"""The files that a command names and only reads. It may write others, such as JSON."""
PARTS = ("orchestrator", "launch", "analysis", "recipes", "clusters")
"""The parts of the checkout that pip installs."""
BUILT_FROM = "built_from.json"
"""The file of an installed folder with the result of :func:`describe_commit` for the checkout."""

PACKAGES = (
    "torch", "triton", "numpy", "tokenizers", "transformer-engine", "megatron-core", "nvidia-nccl-cu13",
    "nvidia-cudnn-cu13", "mamba-ssm", "causal-conv1d",
)  # fmt: skip
"""Distributions whose version may change a run's numbers or speed."""


def package_versions() -> dict[str, str]:
    """Return the version of each installed package of ``PACKAGES``."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def source_digest() -> str:
    """Return the digest of the job's source, the package ``launch``, as it is on disk."""
    content, source = hashlib.sha256(), ROOT / "launch"
    for path in sorted(source.rglob("*.py")):
        content.update(str(path.relative_to(source)).encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:10]


def add_to_python_path(variables: Mapping[str, str]) -> dict[str, str]:
    """Return ``variables`` with this program's packages first in PYTHONPATH, so that a process finds them from any folder."""
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))}


def describe_commit(root: Path, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """Return the commit of this program, whose packages are in ``root``, and whether ``parts`` of it have changes.

    An installed copy names the commit from which it was built, because a repository around it belongs to another project.
    """
    try:
        return dict(json.loads((root / BUILT_FROM).read_text()))
    except FileNotFoundError:
        changed = run_git(root, "status", "--porcelain", "--", *parts)
        return {"commit": run_git(root, "rev-parse", "HEAD"), "dirty": bool(changed)}


def describe_code(folder: Path, command: Sequence[str] = ()) -> dict[str, Any]:
    """Return the commit of the checkout around ``folder``, whether it has changes, and a digest of both.

    Without a checkout, the digest covers the Python files. It also covers the scripts and settings that the words of ``command``
    name, and the code around those outside ``folder``, where the command starts.
    """
    commit = run_git(folder, "rev-parse", "HEAD")
    content = hashlib.sha256((commit or "").encode())
    changes = ""
    if commit is not None:
        changes = run_git(folder, "diff", "HEAD") or ""
        content.update(changes.encode())
    for path in _untracked(folder) if commit is not None else _python_files(folder):
        content.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    words = (word for words in command for word in words.split())
    named = sorted({file for word in words if (file := named_file(folder, word)) and is_code(file)})
    for file in named:
        content.update(str(file).encode() + b"\0" + file.read_bytes())
    outside = {file.parent for file in named if file.suffix in _SCRIPTS and not file.is_relative_to(folder.resolve())}
    for other in sorted(outside):
        content.update(_digest_around(other))
    return {"commit": commit, "dirty": bool(changes), "digest": content.hexdigest()[:10]}


def named_file(folder: Path, word: str) -> Path | None:
    """Return the file that a command's ``word`` names, perhaps after an equals sign or in quotes, or None."""
    path = folder / word.rpartition("=")[2].strip("'\"")
    # Path.is_file raises an error if the word is too long for a name.
    return path.resolve() if os.path.isfile(path) else None  # noqa: PTH113


def is_code(file: Path) -> bool:
    """Return whether the digest of the code covers a ``file`` that a command names, by its name."""
    return file.suffix in (*_SCRIPTS, *_SETTINGS)


def _digest_around(folder: Path) -> bytes:
    """Return a digest of the checkout around a script's ``folder``, or of the Python files directly in it.

    Without a checkout, folders below it may hold anything, for example all files of a user.
    """
    if run_git(folder, "rev-parse", "HEAD") is not None:
        return str(describe_code(folder)["digest"]).encode()
    return b"".join(
        path.name.encode() + b"\0" + path.read_bytes() for path in sorted(folder.glob("*.py")) if path.is_file()
    )


def run_git(folder: Path, *arguments: str) -> str | None:
    """Run git without locks. A killed rank would leave its lock in the user's checkout."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _untracked(folder: Path) -> Iterator[Path]:
    listed = run_git(folder, "ls-files", "--others", "--exclude-standard", "--", "*.py") or ""
    return (path for name in listed.splitlines() if (path := folder / name).is_file())


def _python_files(folder: Path) -> list[Path]:
    """Return the Python files below ``folder``, without hidden folders and installed packages."""
    found = (path for path in folder.rglob("*.py") if path.is_file())
    return sorted(path for path in found if not _is_of_others(path.relative_to(folder).parent))


def _is_of_others(folder: Path) -> bool:
    return any(part in _NOT_OWN or part.startswith(".") for part in folder.parts)
