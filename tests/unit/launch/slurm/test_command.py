"""Test that Slurm's commands may print any bytes, because users name jobs freely."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.slurm.allocation import job_state
from launch.slurm.command import run


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
def test_bytes_that_are_no_utf_8_kill_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locale: str) -> None:
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\nprintf 'RUNNING \\377\\376 N/A\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("LC_ALL", locale)
    assert run("squeue").startswith("RUNNING ")
    assert job_state("12") == "RUNNING"
