"""How long to wait before the next look at Slurm or at the records on disk."""

from __future__ import annotations

LEAST_SECONDS = 3.0
"""Seconds between two calls of a command that answers quickly."""
MOST_LOAD = 0.05
"""The largest share of the time that looking may take."""
MOST_SECONDS = 60.0
"""The most seconds between two calls of a failing command, unless its calls take longer."""


def poll_interval(spent: float, least: float = LEAST_SECONDS, failures: int = 0) -> float:
    """Return the seconds until the next look, after one that took ``spent`` seconds and ``failures`` failures in a row."""
    if not failures:
        return max(least, spent / MOST_LOAD)
    return max(spent, min(MOST_SECONDS, least * 2.0 ** min(failures, 10)))
