"""Digest the source files of imported modules, so that an edit between two runs is seen.

Installed packages are left out, because environment.json has their versions. So is this program, whose commit and digest are there too.
What remains is a program's own code and checkouts that PYTHONPATH or an editable install names.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from launch import ROOT
from launch.contract.records.imported_module import ImportedModule

_INSTALLED = ("/site-packages/", "/dist-packages/")
_OWN = (ROOT / package for package in ("launch", "orchestrator", "analysis"))
_COVERED = tuple(f"{os.path.realpath(folder)}/" for folder in (Path(sysconfig.get_path("stdlib")), *_OWN))


class ImportedCode:
    """The modules that this process has imported so far."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def digest_new(self) -> Mapping[str, ImportedModule]:
        """Return the modules imported since the last call, by name. The script is ``__main__``."""
        new = {name: module for name, module in list(sys.modules.items()) if name not in self._seen}
        self._seen |= new.keys()
        named = sorted((name, new[name]) for name in new if not _is_generated(name))
        found = ((name, path) for name, module in named if (path := _own_source(module)))
        return {name: ImportedModule(_digest(str(path).encode()), _digest(_read(path))) for name, path in found}


def _is_generated(name: str) -> bool:
    """Return whether the module belongs to an installed package, wherever its file is, as code that Inductor compiled does."""
    package, _, rest = name.partition(".")
    return bool(rest) and package in sys.modules and _is_covered(_file(sys.modules[package]))


def _own_source(module: ModuleType) -> Path | None:
    """Return the source file of ``module`` unless a version or another digest covers it."""
    file = _file(module)
    if not file.endswith(".py") or _is_covered(file):
        return None
    # A link may lead to an installed package.
    path = Path(file).resolve()
    return None if _is_covered(str(path)) or not path.is_file() else path


def _file(module: ModuleType) -> str:
    """Return the file of ``module``, or an empty text."""
    # Ask the dictionary, because a lazy module imports more if an attribute is missing.
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else ""


def _is_covered(file: str) -> bool:
    return any(part in file for part in _INSTALLED) or file.startswith(_COVERED)


def _read(path: Path) -> bytes:
    """Return the content of ``path``, or nothing if it cannot be read: a record is no reason to end a run."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:10]
