"""Find the line of this checkout that is being executed."""

from __future__ import annotations

import linecache
import sys
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from launch import ROOT
from launch.common.redact import redact

_FOLDER = Path(__file__).resolve().parent
_LOOKING = frozenset(str(_FOLDER / name) for name in ("source_line.py", "dispatch_trace.py", "capture_blockers.py"))
"""Files that inspect other code, and so are never the cause."""


class Line(NamedTuple):
    """A line of code. ``file`` is an absolute path, or empty if no line of this checkout is known."""

    file: str
    number: int
    function: str

    @property
    def name(self) -> str:
        """The file relative to the checkout."""
        return Path(self.file).relative_to(ROOT).as_posix() if self.file else ""

    @property
    def code(self) -> str:
        return redact(linecache.getline(self.file, self.number).strip()) if self.file else ""


NOWHERE = Line("", 0, "")


def current_user_line() -> Line:
    """Return the innermost line of this checkout on this thread's stack. An autograd thread has none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if _is_ours(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
        frame = frame.f_back
    return NOWHERE


@lru_cache(maxsize=1024)
def _is_ours(file: str) -> bool:
    # A site-packages folder below the checkout has foreign code. The checkout itself may lie inside a site-packages folder.
    path = Path(file)
    ours = path.is_relative_to(ROOT) and "site-packages" not in path.relative_to(ROOT).parts
    return ours and file not in _LOOKING
