"""The digest of the records that a report is written from. A report is fresh as long as it is the same, whatever clocks say."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from launch.common.regular_file import read_regular
from launch.contract.paths import RunPaths, SweepPaths


def digest_records(sweep: SweepPaths, run_ids: Iterable[str]) -> str:
    """Return the digest of every file that a report of ``run_ids`` reads: the plan, specs, and records of all attempts."""
    found = hashlib.sha256(_content(sweep.plan))
    for run_id in run_ids:
        run = sweep.run(run_id)
        for path in _records(run):
            content = _content(path)
            found.update(f"\n{run_id}{str(path).removeprefix(str(run.root))} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _records(run: RunPaths) -> Iterator[Path]:
    yield run.spec
    for attempt in run.attempts():
        yield from (attempt.outcome, attempt.metrics, attempt.environment)
        yield from sorted((attempt.root / "events").glob("rank*.jsonl"))


def _content(path: Path) -> bytes:
    """Return what is in the file, or why it cannot be read, which the report names."""
    try:
        return read_regular(path)
    except OSError as error:
        return repr(error.strerror).encode()
