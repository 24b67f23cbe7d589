"""Test the report by a separate process: the exit code is that of the report, and the command reports why it could not
be written."""

from __future__ import annotations

import resource
import subprocess
from pathlib import Path

import pytest

import analysis.report.write_report
from launch.common.file_lock import Lock
from launch.contract.outcomes import Outcome
from orchestrator.errors import SystemFault
from orchestrator.sweeps import report_process
from orchestrator.sweeps.report_process import read_exit_code, write_report
from tests.records import AttemptRecord, write_sweep


@pytest.fixture(autouse=True)
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_process, "subprocess", subprocess)


def out_of_memory(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.outcome = Outcome("CUDA_OOM", "capture", "bundle000", 0.0, 1.0)


def test_the_exit_code_is_that_of_the_report(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, steps=20, edit=out_of_memory)
    write_report(sweep)
    assert read_exit_code(sweep, allow_empty=False) == read_exit_code(sweep, allow_empty=True) == 3
    assert {path.name for path in sweep.report.iterdir()} == {
        "plots", "report.html", "report.json", "report.md", "steps.parquet", "summary.json",
    }  # fmt: skip


def test_a_reporter_waits_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each process would delete plots of the other, and one report would have files of both."""
    monkeypatch.setattr("analysis.report.write_report.LOCK_SECONDS", 0.1)
    sweep = write_sweep(tmp_path, steps=20)
    with Lock.acquire(sweep.report_lock, 0), pytest.raises(TimeoutError, match=r"held report\.lock for 0\.1 s"):
        analysis.report.write_report.write_report(sweep)
    assert not sweep.report.exists()
    assert analysis.report.write_report.write_report(sweep).exit_code == 0


def test_a_report_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, steps=20)
    sweep.report.write_text("in the way")
    with pytest.raises(SystemFault, match=r"report: cannot be written \(File exists\); to see more: ") as raised:
        write_report(sweep)
    assert "\n" not in str(raised.value)


def test_only_a_full_disk_needs_room(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, steps=20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(SystemFault, match=r"report: cannot be written \(File too large; free space there\)"):
            write_report(sweep)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
