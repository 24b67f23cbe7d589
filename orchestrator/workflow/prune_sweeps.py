"""Delete sweeps, or the files that their reports do not need, but nothing that is still in use.

A sweep leaves the store by one rename. A crash at any moment therefore leaves it complete, without files that nobody reads
again, or out of the store. The next prune deletes what is left outside the store.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.common.atomic_files import RecordError
from launch.common.file_lock import Lock, holder
from launch.common.text import count
from launch.contract.outcomes import read_outcome
from launch.contract.paths import AttemptPaths, BundlePaths, RunPaths, SweepPaths
from orchestrator.errors import SystemFault
from orchestrator.submit.slurm_queue import poll_jobs
from orchestrator.sweeps.run_state import live_runs
from orchestrator.sweeps.slurm_jobs import JobMonitor
from orchestrator.sweeps.store import Store, file_sizes, order_lock, read_plan, report_disk_errors

Keep = Literal["nothing", "reports"]
"""What to keep of a sweep. "reports" keeps its reports, and the records from which they can be written again."""
DAY_SECONDS = 86_400
_TAKEN_OUT = re.compile(r"\.pruned-.+-[0-9a-f]{8}")


@dataclass(frozen=True)
class Pruned:
    """What was or would be deleted of a sweep."""

    sweep: str
    files: int = 0
    bytes: int = 0
    kept: str = ""
    """Why the sweep was kept. Empty if something was or could have been deleted."""
    fault: bool = False
    """Whether the sweep is kept because its state cannot be determined."""


def prune(sweep: SweepPaths, keep: Keep, older_than_days: float | None, *, dry_run: bool) -> Pruned:
    """Delete ``sweep``, or all but what ``keep`` names.

    Keep all of it if one of its runs is running or waiting, or ended within ``older_than_days``.
    """
    name = sweep.root.name
    try:
        # Other programs write a plan.json too, and their folders are not ours to delete.
        read_plan(sweep)
        with order_lock(sweep), _report_lock(sweep) as reportless:
            reason = _reason_to_keep(sweep, older_than_days) if reportless else "its report is being written"
            if reason:
                return Pruned(name, kept=reason)
            found = [sweep.root] if keep == "nothing" else _drop_outside(sweep.root, _find_logs(sweep))
            sizes = [size for path in found for size in file_sizes(path)]
            if not dry_run:
                with report_disk_errors(sweep):
                    if keep == "nothing":
                        _delete_sweep(_take_out(sweep))
                    else:
                        _delete(found)
            return Pruned(name, len(sizes), sum(sizes))
    except FileNotFoundError:
        return Pruned(name, kept="another command has just deleted it")
    except SystemFault as fault:
        return Pruned(name, kept=str(fault), fault=True)


@contextlib.contextmanager
def _report_lock(sweep: SweepPaths) -> Iterator[bool]:
    """Prevent reports of ``sweep`` from being written. Yield False if one is being written."""
    with report_disk_errors(sweep):
        lock = Lock.try_acquire(sweep.report_lock)
    with lock or contextlib.nullcontext():
        yield lock is not None


def delete_leftovers(store: Store) -> None:
    """Delete what an earlier prune took out of the store but did not delete. Keep other folders with similar names.

    Raises:
        SystemFault: the store cannot be written to.
    """
    with report_disk_errors(SweepPaths(store.root)):
        for path in store.root.glob(".pruned-*"):
            if _was_taken_out(path):
                _delete_sweep(path)


def _was_taken_out(path: Path) -> bool:
    """Return whether :func:`_take_out` named the folder: it still has the plan of a sweep, or is empty."""
    if not _TAKEN_OUT.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    with contextlib.suppress(SystemFault, FileNotFoundError):
        read_plan(SweepPaths(path))
        return True
    return not any(path.iterdir())


def _drop_outside(folder: Path, paths: Iterable[Path]) -> list[Path]:
    """Return those ``paths`` that exist in ``folder``. Leave out what is behind a link to somewhere else."""
    root = folder.resolve()
    # Most paths do not exist, and finding this out is ten times faster than resolving a path.
    return [path for path in paths if os.path.lexists(path) and path.resolve().is_relative_to(root)]


def _reason_to_keep(sweep: SweepPaths, older_than_days: float | None) -> str:
    if sweep.root.is_symlink():
        return "it is a link to another folder: prune it there"
    alive = sum(len(run_ids) for _, run_ids in live_runs(sweep, poll_jobs(sweep, JobMonitor())))
    if alive or holder(sweep.queue_lock) is not None:
        return f"{count('run', alive)} running or waiting" if alive else "its queue lives"
    if older_than_days is not None:
        days = (time.time() - _last_change(sweep)) / DAY_SECONDS
        return f"it changed {days:.1f} days ago" if days < older_than_days else ""
    return ""


def _last_change(sweep: SweepPaths) -> float:
    """Return when the sweep's latest run ended, or when it was planned if none has, in seconds since the epoch."""
    ended = (_ended(attempt) for run in _runs(sweep) for attempt in run.attempts())
    return max(ended, default=0.0) or sweep.plan.stat().st_mtime


def _ended(attempt: AttemptPaths) -> float:
    try:
        outcome = read_outcome(attempt)
    except RecordError:
        return attempt.outcome.stat().st_mtime
    return outcome.ended if outcome is not None else 0.0


def _runs(sweep: SweepPaths) -> list[RunPaths]:
    return [RunPaths(path) for path in sorted(sweep.root.glob("runs/*"))]


def _find_logs(sweep: SweepPaths) -> Iterator[Path]:
    """Yield the files that no report reads: logs, job output, uploads, and how ranks of ended attempts ended."""
    yield from (sweep.root / "submitit", sweep.root / "queue.log", sweep.tracking)
    for bundle in map(BundlePaths, sorted(sweep.root.glob("bundles/*"))):
        yield from (bundle.log, bundle.track_log)
    for run in _runs(sweep):
        for attempt in run.attempts():
            # If an attempt has no outcome, these files are the only evidence of how it ended.
            if attempt.has_ended:
                yield from (attempt.logs, attempt.logs_pack, attempt.rank_exits)


def _take_out(sweep: SweepPaths) -> Path:
    """Rename the sweep so that no command finds it any more. Return its new path."""
    return sweep.root.rename(sweep.root.with_name(f".pruned-{sweep.root.name}-{secrets.token_hex(4)}"))


def _delete_sweep(folder: Path) -> None:
    """Delete a sweep that was taken out. Delete its plan last, since the plan shows the next prune what the folder was."""
    plan = SweepPaths(folder).plan
    with contextlib.suppress(FileNotFoundError):
        _delete(path for path in folder.iterdir() if path != plan)
        _delete([plan, folder])


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        # Another prune may be deleting the same files.
        with contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
