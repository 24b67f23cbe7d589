"""Read the records of an attempt. Any record may be incomplete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launch.common.atomic_files import RecordError
from launch.common.redact import redact
from launch.contract.paths import AttemptPaths
from launch.contract.records.events import Phase, read_events
from launch.failures.diagnose import EndedBy, Evidence, RankException
from launch.failures.printed_errors import LastWords, last_words

Events = Mapping[int, list[dict[str, Any]]]
"""The events of each rank."""
_TAIL_BYTES = 2**17
"""The last tracebacks of the eight ranks that share a torchrun's log fit in."""


def read_all_events(attempt: AttemptPaths) -> Events:
    """Return the readable events of each rank."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted((attempt.root / "events").glob("rank*.jsonl")):
        rank = int(path.stem.removeprefix("rank"))
        found[rank] = []
        # The report names a damaged record. Here it must not end the supervisor.
        with contextlib.suppress(RecordError):
            found[rank].extend(read_events(attempt, rank))
    return found


def last_phases(events: Events) -> dict[int, Phase]:
    """Return the last phase that each rank entered."""
    return {rank: lines[-1]["phase"] for rank, lines in events.items() if lines}


def read_evidence(attempt: AttemptPaths, ended_by: EndedBy) -> Evidence:
    """Return the ranks' records of the end of an attempt."""
    events = read_all_events(attempt)
    return Evidence(ended_by, exit_code=0, phases=last_phases(events), exceptions=_exceptions(events))


def _exceptions(events: Events) -> tuple[RankException, ...]:
    # torchrun's own exception only says that a rank has failed.
    return tuple(
        RankException(rank, event["time"], event["phase"], event["type"], event["message"])
        for rank, lines in events.items()
        for event in lines
        if event["kind"] == "exception" and event["type"] != "ChildFailedError"
    )


def read_last_words(log: Path) -> LastWords:
    """Return the error that ended the program of ``log``, without secrets. It is empty if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(-min(_TAIL_BYTES, file.seek(0, 2)), 2)
            text = file.read().decode(errors="replace")
    except OSError:
        return LastWords()
    return last_words(redact(text))


def record_bytes(attempt: AttemptPaths) -> int:
    """Return the size in bytes of the files that ranks write. Its growth is the attempt's heartbeat.

    Logs count until the first step. Loading and compiling may take longer than any step, and only logs show them.
    """
    written = _size([attempt.metrics, *(attempt.root / "events").glob("rank*.jsonl")])
    return written if attempt.metrics.exists() else written + _size(attempt.logs.glob("*.log"))


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files if path.exists())
