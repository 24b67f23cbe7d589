"""Pack the many files of a completed attempt's ranks into two files."""

from __future__ import annotations

import contextlib

from launch.common.atomic_files import RecordError
from launch.common.packed_files import pack
from launch.contract.outcomes import read_outcome
from launch.contract.paths import AttemptPaths


def pack_if_completed(attempt: AttemptPaths, ranks: int) -> None:
    """Pack the files of ``ranks`` ranks, which have all ended, if the attempt completed.

    All files of a failed attempt stay in place, for people who examine them.
    """
    # If the disk has no room for a pack, the files stay as they are. They can be read unpacked.
    with contextlib.suppress(OSError, RecordError):
        outcome = read_outcome(attempt)
        if outcome is None or outcome.outcome != "COMPLETED":
            return
        # Find files by name. On a shared file system, a listing may be older than the files of other nodes.
        numbers = range(ranks)
        records = (attempt.environment, *map(attempt.events, numbers), *map(attempt.rank_exit, numbers))
        pack(attempt.records_pack, records)
        pack(attempt.logs_pack, (attempt.launcher_log, *map(attempt.log, numbers)))
