"""Test which processes count as compilers at work, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.contract.paths import AttemptPaths
from launch.supervise import compilers, slurm_rank
from launch.supervise.compilers import CompilerWatch

SPIN, IDLE = "while :; do :; done", "sleep 60"


@contextmanager
def program(folder: Path, name: str, does: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process called ``name`` below another one, as ranks run compilers."""
    script = folder / name
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    words = ["sh", "-c", f"'{script}' & wait"]
    with subprocess.Popen(words, start_new_session=True) as parent:
        try:
            yield parent
        finally:
            os.killpg(parent.pid, 9)


@pytest.mark.parametrize(
    ("name", "does", "busy"),
    [("ptxas", SPIN, True), ("clang-17", SPIN, True), ("ptxas", IDLE, False), ("pt_main_thread", SPIN, False)],
)  # fmt: skip
def test_only_a_compiler_that_computes_is_at_work(tmp_path: Path, name: str, does: str, busy: bool) -> None:
    """A rank that spins in a collective computes, too."""
    now = time.monotonic()
    watch = CompilerWatch(os.getpid(), now)
    with program(tmp_path, name, does):
        time.sleep(0.5)
        assert not watch.are_busy(now + 0.5), "it is not time to look yet"
        compilers_share = compilers.BUSY_SHARE * compilers.LOOK_SECONDS
        while busy and compilers.compiler_seconds(os.getpid()) < 1.1 * compilers_share:
            time.sleep(0.1)
        assert watch.are_busy(now + compilers.LOOK_SECONDS) == busy
    assert not CompilerWatch(os.getpid(), now).are_busy(now + compilers.LOOK_SECONDS), "it has ended"


def test_workers_of_inductor_are_compilers_and_other_processes_of_the_host_are_not(tmp_path: Path) -> None:
    worker = tmp_path / "_inductor" / "compile_worker" / "__main__.py"
    worker.parent.mkdir(parents=True)
    worker.write_text("while True: pass")
    with subprocess.Popen([sys.executable, worker]) as process:
        while not compilers.compiler_seconds(os.getpid()):
            time.sleep(0.1)
        assert not compilers.compiler_seconds(process.pid), "it is no descendant of itself"
        process.kill()


def test_under_slurm_the_node_of_a_rank_says_that_compilers_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compilers, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(slurm_rank, "LOOK_SECONDS", 0.2)
    with program(tmp_path, "nvcc", f"( sleep 2; kill $$ ) & {SPIN}") as rank:
        assert slurm_rank._wait(rank, AttemptPaths(tmp_path)) == 0
    assert "compilers work" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    with program(tmp_path, "nvcc", f"( sleep 2; kill $$ ) & {SPIN}") as rank:
        slurm_rank._wait(rank, AttemptPaths(tmp_path))
    assert not capsys.readouterr().err, "after the first step only steps count"
