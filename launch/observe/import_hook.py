"""Call a function right after the program has imported a module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Then = Callable[[ModuleType], None]


def after_import(name: str, then: Then) -> None:
    """Call ``then`` with module ``name`` once it is imported, or at once if it already is."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Finds one module by the other finders, and wraps its loader."""

    def __init__(self, name: str, then: Then) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(fullname)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            found.loader.exec_module = execute_and_tell  # type: ignore[method-assign] # of this module's loader alone
        return found
