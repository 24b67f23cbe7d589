"""Output streams for a person. Text from records cannot control the terminal, and secrets are hidden."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TextIO, cast

from launch.common.redact import Secrets
from launch.common.text import escape_invisible


class VisibleStream(io.TextIOBase):
    """Writes to ``stream`` with control characters escaped and the shell's secrets hidden."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._secrets = Secrets()

    def write(self, text: str) -> int:
        self.stream.write(escape_invisible(self._secrets.hide(text)))
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()


@contextlib.contextmanager
def visible_output() -> Iterator[None]:
    """Make standard output and standard error visible streams. A shell may have closed them: ``>&-``."""
    out, err = (stream and cast(TextIO, VisibleStream(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def raw_stdout() -> TextIO:
    """Return standard output without escaping, for the bytes of a log and for a table that is redrawn."""
    return sys.stdout.stream if isinstance(sys.stdout, VisibleStream) else sys.stdout
