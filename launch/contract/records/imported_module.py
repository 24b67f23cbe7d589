"""A module that a rank has imported, as far as a later run must find it unchanged."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImportedModule:
    """The digests of a source file's path and of its content, ten hexadecimal digits each."""

    path: str
    content: str
