"""The digest of a report's records. A report is fresh as long as the digest is the same; file times do not matter."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from launch.common.atomic_files import RecordError
from launch.common.regular_file import read_regular
from launch.contract.paths import AttemptPaths, RunPaths, SweepPaths


def digest_records(sweep: SweepPaths, run_ids: Iterable[str]) -> str:
    """Return the digest of every file that a report of ``run_ids`` reads: the plan, orders and what ends them, specs, and records of all
    attempts."""
    found = hashlib.sha256(_content(sweep.plan))
    for name in ("bundle.json", "begun.jsonl", "early_stop.json", "cancel"):
        for record in sorted(sweep.bundles.glob(f"*/{name}")):
            found.update(_content(record))
    for run_id in run_ids:
        run = sweep.run(run_id)
        for path, content in _records(run):
            found.update(f"\n{run_id}{str(path).removeprefix(run.path)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _records(run: RunPaths) -> Iterator[tuple[Path, bytes]]:
    """Yield each record with its content, which is the same before and after packing."""
    yield run.spec, _content(run.spec)
    for attempt in run.attempts():
        for path in (attempt.outcome, attempt.metrics, attempt.environment, *_all_events(attempt)):
            yield path, _content(path, attempt.read)


def _all_events(attempt: AttemptPaths) -> Sequence[Path]:
    try:
        return attempt.all_events()
    except (OSError, RecordError):
        return ()


def _content(path: Path, read: Callable[[Path], bytes] = read_regular) -> bytes:
    """Return the file's content. If it cannot be read, return the reason, which the report names."""
    try:
        return read(path)
    except OSError as error:
        return repr(error.strerror).encode()
    except RecordError as error:
        return str(error).encode()
