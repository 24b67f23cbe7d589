"""Test copied records: a copy is no separate run, so nothing passes because of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from analysis.report.summary import Summary, summarise
from analysis.sweep.judge_sweep import judge_sweep
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.plan import read_plan
from tests.records import AttemptRecord, write_sweep


def diverged_repeat(run: AttemptRecord) -> None:
    if run.spec.graphed and run.spec.repeat == 1:
        run.metrics[60]["loss"] += 5.0


@pytest.fixture
def sweep(tmp_path: Path) -> SweepPaths:
    return write_sweep(tmp_path, edit=diverged_repeat)


def attempts(sweep: SweepPaths) -> list[AttemptPaths]:
    """Return the attempts of the graphed cell, by repeat."""
    (cell,) = (cell for cell in read_plan(sweep).cells if cell.graphed)
    return [sweep.run(run_id).attempt(1) for run_id in cell.run_ids]


def judged(sweep: SweepPaths) -> Summary:
    return summarise(judge_sweep(sweep).results)


def test_one_repeat_copied_over_another_hides_nothing(sweep: SweepPaths) -> None:
    assert judged(sweep).verdicts == {"DIVERGED": 1}
    sound, diverged = attempts(sweep)
    shutil.copytree(sound.root, diverged.root, dirs_exist_ok=True)
    found = judged(sweep)
    assert (found.exit_code, found.verdicts) == (3, {"INCOMPARABLE": 1})
    assert f"outcome.json cannot be read: it is of attempt 1 of run {sound.run_id}" in found.text


@pytest.mark.parametrize("record", ["environment.json", "events/rank0.jsonl"])
def test_each_record_names_its_attempt(sweep: SweepPaths, record: str) -> None:
    sound, diverged = attempts(sweep)
    shutil.copy(sound.root / record, diverged.root / record)
    found = judged(sweep)
    assert (found.exit_code, found.verdicts) == (3, {"INCOMPARABLE": 1})
    assert f"cannot be read: it is of attempt 1 of run {sound.run_id}" in found.text


def test_an_attempt_of_another_number_is_a_copy_too(sweep: SweepPaths) -> None:
    first = attempts(sweep)[0]
    shutil.copytree(first.root, first.root.with_name("2"))
    assert "attempts/2/outcome.json cannot be read: it is of attempt 1 of run" in judged(sweep).text


@pytest.mark.parametrize("copied", ["*", "metrics.jsonl"])
def test_a_copy_under_another_name_is_found_by_its_steps(sweep: SweepPaths, copied: str) -> None:
    sound, diverged = attempts(sweep)
    for path in (file for file in sound.root.rglob(copied) if file.is_file()):
        text = path.read_text().replace(sound.run_id, diverged.run_id)
        (diverged.root / path.relative_to(sound.root)).write_text(text)
    found = judged(sweep)
    assert (found.exit_code, found.verdicts) == (3, {"INCOMPARABLE": 1})
    assert f"its steps and their times are those of attempt 1 of run {diverged.run_id}: one is a copy" in found.text
