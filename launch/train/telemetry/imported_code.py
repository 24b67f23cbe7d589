"""Digest the source files of imported modules, so that an edit between two runs is seen.

Installed packages are left out, because environment.json has their versions. So is this package, which has a digest of its own.
What remains is a program's own code and checkouts that PYTHONPATH or an editable install names.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from launch import ROOT
from launch.contract.records.imported_module import ImportedModule

_INSTALLED = ("site-packages", "dist-packages")
_COVERED = (Path(sysconfig.get_path("stdlib")).resolve(), ROOT.resolve() / "launch")


class ImportedCode:
    """The modules that this process has imported so far."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def digest_new(self) -> Mapping[str, ImportedModule]:
        """Return the modules imported since the last call, by name. The script is ``__main__``."""
        new = {name: module for name, module in list(sys.modules.items()) if name not in self._seen}
        self._seen |= new.keys()
        found = ((name, path) for name, module in sorted(new.items()) if (path := _own_source(module)))
        return {name: ImportedModule(_digest(str(path).encode()), _digest(path.read_bytes())) for name, path in found}


def _own_source(module: ModuleType) -> Path | None:
    """Return the source file of ``module`` unless a version or another digest covers it."""
    # Ask the dictionary, because a lazy module imports more if an attribute is missing.
    file = getattr(module, "__dict__", {}).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    if any(part in _INSTALLED for part in path.parts) or any(path.is_relative_to(folder) for folder in _COVERED):
        return None
    return path if path.is_file() else None


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:10]
