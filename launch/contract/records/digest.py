"""The digest of the records that a report is written from. A report is fresh as long as it is the same, whatever clocks say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from launch.contract.paths import AttemptPaths, SweepPaths


def digest_records(sweep: SweepPaths, run_ids: Iterable[str]) -> str:
    """Return the digest of the plan of ``sweep``, and of the attempts and outcomes of ``run_ids``.

    Raises:
        OSError: a record cannot be read.
    """
    found = hashlib.sha256(sweep.plan.read_bytes())
    for run_id in run_ids:
        for attempt in sweep.run(run_id).attempts():
            found.update(f"\n{run_id} {attempt.number} ".encode() + _ending(attempt))
    return found.hexdigest()


def _ending(attempt: AttemptPaths) -> bytes:
    """Return the outcome, or the size of the steps so far. Steps do not change after the outcome."""
    try:
        return attempt.outcome.read_bytes()
    except FileNotFoundError:
        return str(attempt.metrics.stat().st_size if attempt.metrics.exists() else 0).encode()
