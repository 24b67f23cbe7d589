"""Suggest the known name that a mistyped one probably means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(value: object, known: Iterable[str], otherwise: str | None = None, cutoff: float = 0.6) -> str:
    """Return "did you mean ...?" for the closest of ``known``, else ``otherwise``, else the list of ``known``."""
    names = sorted(known)
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=cutoff)
    if close:
        return f"did you mean {close[0]!r}?"
    if otherwise is not None:
        return otherwise
    return f"known: {', '.join(names)}" if names else ""
