"""Read the records of an attempt. Any record may be incomplete."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from launch.common.atomic_files import RecordError
from launch.common.redact import redact
from launch.contract.paths import AttemptPaths
from launch.contract.records.events import Phase, read_events
from launch.failures.diagnose import EndedBy, Evidence, RankException

Events = Mapping[int, list[dict[str, Any]]]
"""The events of each rank."""
_ERROR = re.compile(r"(\[rank\d+\]:)?\s*([\w.]*(Error|Exception|Fault)\b|\S+: (error: |can't open file ))")
_OF_TORCHRUN = "torch/distributed/elastic/"
"""After a line with this path torchrun prints only that its ranks have failed."""
_TAIL_BYTES, _MOST_WORDS = 2**14, 300


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


def last_words(log: Path) -> str:
    """Return the last line of ``log`` that names an error, else its last line, without secrets; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(-min(_TAIL_BYTES, file.seek(0, 2)), 2)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [
        line.strip() for line in takewhile(lambda line: _OF_TORCHRUN not in line, text.splitlines()) if line.strip()
    ]
    named = [line for line in lines if _ERROR.match(line)]
    return redact((named or lines or [""])[-1][:_MOST_WORDS])


def record_bytes(attempt: AttemptPaths) -> int:
    """Return the size in bytes of the files that ranks write. Its growth is the attempt's heartbeat."""
    files = [attempt.metrics, *(attempt.root / "events").glob("rank*.jsonl")]
    return sum(path.stat().st_size for path in files if path.exists())
