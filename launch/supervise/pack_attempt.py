"""Leave few files of an attempt that completed: those of its ranks, which are many, become two."""

from __future__ import annotations

import contextlib

from launch.common.atomic_files import RecordError
from launch.common.packed_files import pack
from launch.contract.outcomes import read_outcome
from launch.contract.paths import AttemptPaths


def pack_if_completed(attempt: AttemptPaths, ranks: int) -> None:
    """Pack the files of ``ranks`` ranks, which have all ended, if the attempt completed.

    Of one that failed everything stays in place, for who looks into it.
    """
    # Where there is no room for a pack, the files stay as they are: they are read as well.
    with contextlib.suppress(OSError, RecordError):
        outcome = read_outcome(attempt)
        if outcome is None or outcome.outcome != "COMPLETED":
            return
        # By name: on a shared file system a listing may be older than the files of other nodes.
        numbers = range(ranks)
        records = (attempt.environment, *map(attempt.events, numbers), *map(attempt.rank_exit, numbers))
        pack(attempt.records_pack, records)
        pack(attempt.logs_pack, (attempt.logs / "launcher.log", *map(attempt.log, numbers)))
