"""Read what the program prints from Python. Its streams stay the same objects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import local
from typing import Any

Read = Callable[[str, list[str]], None]
"""Takes printed text and the incomplete line before it, which it replaces."""


class PrintedStreams:
    """Hooks standard output and error, and again if the program has replaced them."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._thread = local()
        """Whether this thread writes to a hooked stream now, in ``writes``."""

    def hook(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            # A process may have no stream, and an object in its place may take no attribute.
            if hasattr(stream, "__dict__") and not hasattr(stream.write, "is_observed"):
                self._hook(stream)

    def pass_on(self, write: Callable[[], Any]) -> Any:
        """Call ``write``. What this thread writes in it is not read."""
        if getattr(self._thread, "writes", False):
            return write()
        self._thread.writes = True
        try:
            return write()
        finally:
            self._thread.writes = False

    def _hook(self, stream: Any) -> None:
        write, rest = stream.write, [""]

        def read(text: str) -> Any:
            # A stream of the program may pass its text on to the one that it replaces, in other lines.
            if getattr(self._thread, "writes", False):
                return write(text)
            written = self.pass_on(lambda: write(text))
            self._read(text, rest)
            return written

        read.is_observed = True  # type: ignore[attr-defined]
        stream.write = read
