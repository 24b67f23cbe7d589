"""Test a completed attempt in few files: every reader finds the same content as before, whenever a crash came."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from analysis.records.load import Records, load
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.plan import read_plan
from launch.contract.records.digest import digest_records
from launch.supervise.pack_attempt import pack_if_completed
from tests.records import AttemptRecord, unchanged, write_sweep

RANKS = 3


def written(root: Path, edit: Any = unchanged) -> tuple[SweepPaths, list[AttemptPaths]]:
    """Write a sweep whose ranks left logs. Only the log of rank 1 has content."""
    sweep = write_sweep(root / "sweep", repeats=1, ranks=RANKS, edit=edit)
    attempts = [sweep.run(run_id).attempt(1) for run_id in read_plan(sweep).cell_of_run()]
    for attempt in attempts:
        attempt.logs.mkdir()
        for log in (attempt.logs / "launcher.log", *map(attempt.log, range(RANKS))):
            log.write_text("one\n" if log.stem == "rank1" else "")
    return sweep, attempts


def read(sweep: SweepPaths) -> tuple[str, str]:
    """Return the digest of the records, and the content that the analysis reads."""
    records: Records = load(sweep)
    return digest_records(sweep, sorted(read_plan(sweep).cell_of_run())), repr(records)


def names(attempt: AttemptPaths) -> set[str]:
    """Return the names of all files and folders, except those that a crash left half-written."""
    return {str(path.relative_to(attempt.root)) for path in attempt.root.rglob("[!.]*")}


def test_a_completed_attempt_is_read_as_before(tmp_path: Path) -> None:
    sweep, attempts = written(tmp_path)
    before = read(sweep)
    for attempt in attempts:
        pack_if_completed(attempt, RANKS)
        pack_if_completed(attempt, RANKS)
        assert names(attempt) == {"outcome.json", "metrics.jsonl", "records.pack", "logs.pack"}
    assert read(sweep) == before


def test_a_crash_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, (attempt, *_) = written(tmp_path)
    before = read(sweep)

    def crash_after(calls: int) -> bool:
        """Pack the attempt, and die after ``calls`` changes of the disk, before the next one."""
        left = itertools.count(calls, -1)

        with monkeypatch.context() as patch:
            for holder, name in ((Path, "unlink"), (Path, "rmdir"), (os, "replace")):
                done = getattr(holder, name)

                def act(*arguments: Any, _done: Any = done, **named: Any) -> Any:
                    if next(left) <= 0:
                        raise KeyboardInterrupt
                    return _done(*arguments, **named)

                patch.setattr(holder, name, act)
            try:
                pack_if_completed(attempt, RANKS)
            except KeyboardInterrupt:
                return True
        return False

    crashes = 0
    while crash_after(crashes):
        crashes += 1
        assert read(sweep) == before
        assert b"one\n" in (attempt.log(1) if attempt.log(1).exists() else attempt.logs_pack).read_bytes()
        assert crashes < 20
    assert crashes > 3 and names(attempt) == {"outcome.json", "metrics.jsonl", "records.pack", "logs.pack"}


def test_a_large_file_stays_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep, (attempt, *_) = written(tmp_path)
    before = read(sweep)
    monkeypatch.setattr("launch.common.packed_files.MOST_BYTES", attempt.environment.stat().st_size)
    pack_if_completed(attempt, RANKS)
    assert attempt.events(0).exists() and not attempt.environment.exists()
    assert read(sweep) == before


def test_a_failed_attempt_stays_as_it_is(tmp_path: Path) -> None:
    def not_ended(record: AttemptRecord) -> None:
        record.outcome = None

    for place, edit in enumerate((lambda record: record.end(outcome="HANG"), not_ended)):
        _, attempts = written(tmp_path / str(place), edit)
        for attempt in attempts:
            before = names(attempt)
            pack_if_completed(attempt, RANKS)
            assert names(attempt) == before


def test_a_file_that_appears_late_is_read(tmp_path: Path) -> None:
    """A shared file system may show the files of another node late."""
    sweep, (attempt, *_) = written(tmp_path)
    before = read(sweep)
    late = attempt.events(2).rename(tmp_path / "late")
    pack_if_completed(attempt, RANKS)
    assert read(sweep) != before
    attempt.events(2).parent.mkdir(exist_ok=True)
    late.rename(attempt.events(2))
    assert read(sweep) == before


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"[1]\n", b'{"environment.json": 2.5}\n{}', b'{"environment.json": -1}\n', b"\0"])  # fmt: skip
def test_a_damaged_pack_is_a_problem_of_its_run_alone(tmp_path: Path, damage: bytes) -> None:
    sweep, attempts = written(tmp_path)
    for attempt in attempts:
        pack_if_completed(attempt, RANKS)
    before = digest_records(sweep, [attempts[0].run_id])
    attempts[0].records_pack.write_bytes(damage)
    damaged, whole = (runs[0].attempt for runs in load(sweep).runs.values())
    assert damaged is not None and any("environment.json cannot be read" in problem for problem in damaged.problems)
    assert whole is not None and whole.problems == ()
    assert digest_records(sweep, [attempts[0].run_id]) != before


def test_an_outcome_of_another_attempt_packs_nothing(tmp_path: Path) -> None:
    _, (attempt, other) = written(tmp_path)
    attempt.outcome.write_bytes(other.outcome.read_bytes())
    pack_if_completed(attempt, RANKS)
    assert attempt.events(0).exists()
