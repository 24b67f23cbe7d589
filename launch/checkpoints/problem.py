"""A problem of a checkpoint, in words."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

SHOWN = 8
"""Items that a message lists before it counts the rest."""

COPY_AGAIN = "copy or download it again"


class CheckpointProblem(NamedTuple):
    """One problem of a checkpoint, and its fix."""

    found: str
    remedy: str


def unreadable(name: str, error: OSError | ValueError) -> CheckpointProblem:
    """Return the problem of a file or folder without the paths in ``error``, which may be private."""
    if isinstance(error, OSError):
        remedy = "give the job's user the right to read it, or name another path"
        return CheckpointProblem(f"{name} cannot be read ({error.strerror})", remedy)
    return CheckpointProblem(f"{name} is damaged ({error})", COPY_AGAIN)


def shortened(items: Collection[str]) -> str:
    shown = ", ".join(list(items)[:SHOWN])
    return f"{shown} and {len(items) - SHOWN} more" if len(items) > SHOWN else shown
