"""The identity of a record. Outcome, environment and first event name their run and attempt, so a misplaced copy is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.contract.paths import AttemptPaths


def identity_of(attempt: AttemptPaths) -> dict[str, Any]:
    """Return the identity fields of the records of ``attempt``."""
    return {"run_id": attempt.run_id, "attempt": attempt.number}


def without_identity(attempt: AttemptPaths, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` without its identity fields, after checking them.

    Raises:
        TypeError: the record does not name its run and attempt.
        ValueError: the record belongs to another attempt.
    """
    expected = identity_of(attempt)
    rest = {**content}
    found = {name: rest.pop(name, None) for name in expected}
    if None in found.values():
        raise TypeError("it does not name its run and attempt")
    if found != expected:
        raise ValueError(f"it is of attempt {found['attempt']} of run {found['run_id']}")
    return rest
