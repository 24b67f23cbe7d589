"""What is wrong with a checkpoint, in words."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

SHOWN = 8
"""How many items a message lists before it counts the rest."""

COPY_AGAIN = "copy or download it again"


class CheckpointProblem(NamedTuple):
    """One thing that is wrong with a checkpoint, and the way out."""

    found: str
    remedy: str


def unreadable(name: str, error: OSError | ValueError) -> CheckpointProblem:
    """The fault of a file or folder. What ``error`` says of paths is left out: they may be private."""
    if isinstance(error, OSError):
        remedy = "give the job's user the right to read it, or name another path"
        return CheckpointProblem(f"{name} cannot be read ({error.strerror})", remedy)
    return CheckpointProblem(f"{name} is damaged ({error})", COPY_AGAIN)


def shortened(items: Collection[str]) -> str:
    shown = ", ".join(list(items)[:SHOWN])
    return f"{shown} and {len(items) - SHOWN} more" if len(items) > SHOWN else shown
