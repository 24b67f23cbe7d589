"""How long to wait before Slurm, or the records on disk, are looked at again."""

from __future__ import annotations

LEAST_SECONDS = 3.0
"""Between two calls of a command that answers at once."""
MOST_LOAD = 0.05
"""The share of the time that looking takes at most."""
MOST_SECONDS = 60.0
"""Between two calls of a command that fails."""


def poll_interval(spent: float, least: float = LEAST_SECONDS, failures: int = 0) -> float:
    """Return seconds to the next look, after one that took ``spent`` seconds and was the last of ``failures`` to fail."""
    if not failures:
        return max(least, spent / MOST_LOAD)
    return max(spent, min(MOST_SECONDS, least * 2.0 ** min(failures, 10)))
