"""The report by a process of its own: its exit code is the report's, and what keeps it from being written is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.contract.outcomes import Outcome
from orchestrator.errors import SystemFault
from orchestrator.sweeps.report_process import write_report
from tests.records import AttemptRecord, write_sweep


def out_of_memory(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.outcome = Outcome("CUDA_OOM", "capture", "bundle000", 0.0, 1.0)


def test_the_value_is_the_exit_code_of_the_report(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, steps=20, edit=out_of_memory)
    assert write_report(sweep) == 3
    assert {path.name for path in sweep.report.iterdir()} == {
        "plots", "report.html", "report.json", "report.md", "steps.parquet", "summary.json",
    }  # fmt: skip


def test_a_report_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, steps=20)
    sweep.report.write_text("in the way")
    with pytest.raises(SystemFault, match=r"report: cannot be written \(.*\); free space") as raised:
        write_report(sweep)
    assert "\n" not in str(raised.value)
