"""Find a run by its id, or by a prefix of it."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator import PROGRAM
from orchestrator.errors import input_error
from orchestrator.suggestion import suggestion

MOST_NAMED = 8
"""How many matches an error lists."""


def find_by_run_id(targets: Iterable[tuple[str, str]], prefix: str, where: str) -> str:
    """Return the target of the run with id ``prefix``, or the only target of all runs whose ids begin with ``prefix``.

    Args:
        targets: run ids, each with its target: the run itself, or its cell.
        where: the sweep or the store of the runs, for the error.

    Raises:
        InputError: no target matches, or several do.
    """
    known = dict(targets)
    found = [(run_id, target) for run_id, target in known.items() if run_id.startswith(prefix)]
    exact = [target for run_id, target in found if run_id == prefix]
    matches = list(dict.fromkeys(exact or [target for _, target in found]))
    if not matches:
        fix = suggestion(
            prefix, {run_id[: len(prefix)] for run_id in known}, otherwise=f"{PROGRAM} status SWEEP lists the runs"
        )
        raise input_error("", f"no run of {where} begins with {prefix!r}", fix)
    if len(matches) > 1:
        candidates = ", ".join(matches[:MOST_NAMED])
        raise input_error("", f"{prefix!r} matches several runs", f"write more of it: {candidates}")
    return matches[0]
