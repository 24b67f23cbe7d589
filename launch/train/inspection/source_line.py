"""Find the line of code that is being executed, of this checkout or of a user's program."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from launch import ROOT
from launch.common.redact import redact

_FOLDER = Path(__file__).resolve().parent
_LOOKING = frozenset(
    str(_FOLDER / name) for name in ("source_line.py", "dispatch_trace.py", "step_operators.py", "capture_blockers.py")
)
"""Files that inspect other code, and so are never the cause."""
_LIBRARIES = (ROOT / "launch", Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib")))
"""Folders whose code is never the user's: the observer, PyTorch and Python. Packages may be installed in the last one."""
_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""The names of folders with installed packages."""


class Line(NamedTuple):
    """A line of code. ``file`` is an absolute path, or empty if no line is known."""

    file: str
    number: int
    function: str

    @property
    def name(self) -> str:
        """The file relative to the checkout, or to the folder from which Python imports it."""
        if not self.file:
            return ""
        path = Path(self.file)
        folders = [ROOT] if _is_ours(self.file) else [Path(entry).absolute() for entry in sys.path]
        names = [path.relative_to(folder).as_posix() for folder in folders if path.is_relative_to(folder)]
        return min(names, key=len, default=path.name)

    @property
    def code(self) -> str:
        return redact(linecache.getline(self.file, self.number).strip()) if self.file else ""


NOWHERE = Line("", 0, "")


def current_user_line() -> Line:
    """Return the innermost line of this checkout on this thread's stack. An autograd thread has none."""
    return _innermost(_is_ours)


def current_program_line() -> Line:
    """Return the innermost line that is neither PyTorch's nor Python's own: a line of the user's program or of its trainer."""
    return _innermost(_is_of_program)


def _innermost(is_cause: Callable[[str], bool]) -> Line:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if is_cause(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
        frame = frame.f_back
    return NOWHERE


@lru_cache(maxsize=1024)
def _is_ours(file: str) -> bool:
    # A site-packages folder below the checkout has foreign code. The checkout itself may lie inside a site-packages folder.
    path = Path(file)
    ours = path.is_relative_to(ROOT) and "site-packages" not in path.relative_to(ROOT).parts
    return ours and file not in _LOOKING


@lru_cache(maxsize=1024)
def _is_of_program(file: str) -> bool:
    # Files in angle brackets are code that Python itself or a compiler made.
    path = Path(file).absolute()
    below = [path.relative_to(folder) for folder in _LIBRARIES if path.is_relative_to(folder)]
    return not file.startswith("<") and all(_PACKAGES & set(part.parts) for part in below)
