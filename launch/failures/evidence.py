"""What an attempt has left on disk, gathered for its diagnosis; none of it needs to be whole."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from launch.common.atomic_files import RecordError
from launch.contract.paths import AttemptPaths
from launch.contract.records.events import Phase, read_events
from launch.failures.diagnose import EndedBy, Evidence, RankException

Events = Mapping[int, list[dict[str, Any]]]
"""By rank."""


def events_of(attempt: AttemptPaths) -> Events:
    """What each rank has recorded, as far as it can be read."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted((attempt.root / "events").glob("rank*.jsonl")):
        rank = int(path.stem.removeprefix("rank"))
        found[rank] = []
        # The report names a record that is damaged; here it must not end the supervision.
        with contextlib.suppress(RecordError):
            found[rank].extend(read_events(attempt, rank))
    return found


def phases_of(events: Events) -> dict[int, Phase]:
    """The last phase that each rank entered; rank 0's is the attempt's, "init" where it has none."""
    return {rank: lines[-1]["phase"] for rank, lines in events.items() if lines}


def read_evidence(attempt: AttemptPaths, ended_by: EndedBy) -> Evidence:
    """Return what the ranks of an attempt recorded."""
    events = events_of(attempt)
    return Evidence(ended_by, exit_code=0, phases=phases_of(events), exceptions=_exceptions(events))


def _exceptions(events: Events) -> tuple[RankException, ...]:
    return tuple(
        RankException(rank, event["time"], event["phase"], event["type"], event["message"])
        for rank, lines in events.items()
        for event in lines
        if event["kind"] == "exception"
    )


def record_bytes(attempt: AttemptPaths) -> int:
    """Bytes in the files that ranks write: the attempt's heartbeat."""
    files = [attempt.metrics, *(attempt.root / "events").glob("rank*.jsonl")]
    return sum(path.stat().st_size for path in files if path.exists())
