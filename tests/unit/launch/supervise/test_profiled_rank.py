"""Test a rank under Nsight Systems, which a script replaces, and the ranges that it would show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch.common.atomic_files import write_json
from launch.contract.errors import EnvironmentFault
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.spec import Data, Model, RunSpec, Training, spec_to_json
from launch.engines.profile_ranges import RANGES
from launch.engines.protocol import RankPlace
from launch.supervise import profiled_rank
from launch.supervise.local_ranks import rank_program
from launch.train import worker
from launch.train.telemetry import event_log, step_metrics

SPEC = RunSpec(
    model=Model(num_layers=2),
    training=Training(steps=7, sequence_length=8, global_batch_size=2),
    data=Data(kind="synthetic"),
    profile="nsys",
)
NSYS = """#!/bin/sh
# Writes its own arguments in place of a profile, and then runs the program.
for word in "$@"; do case "$word" in --output=*) file="${word#--output=}";; esac; done
echo "$@" > "$file"
while [ "${1#*python}" = "$1" ]; do shift; done
exec "$@"
"""


def run_rank(folder: Path) -> tuple[subprocess.CompletedProcess[str], AttemptPaths]:
    run = SweepPaths(folder).run(SPEC.run_id)
    attempt = run.attempt(1)
    attempt.root.mkdir(parents=True)
    write_json(attempt.spec, spec_to_json(SPEC))
    tools = folder / "bin"
    tools.mkdir()
    (tools / "nsys").write_text(NSYS)
    (tools / "nsys").chmod(0o755)
    module, count = rank_program(SPEC)
    assert count == 1
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    path = os.pathsep.join((str(tools), "/usr/bin", "/bin"))
    done = subprocess.run(
        [sys.executable, "-m", module, str(attempt.root)],
        env={**os.environ, **place, "MASTER_PORT": "1", "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, attempt


def test_a_rank_runs_under_nsys_which_writes_among_its_records(tmp_path: Path) -> None:
    done, attempt = run_rank(tmp_path)
    assert done.returncode == 0, attempt.log(0).read_text()
    command = attempt.profile(0).read_text()
    assert command.startswith("profile --trace=cuda,nvtx --cuda-graph-trace=graph ")
    assert f"-m launch.train.worker {attempt.root}" in command
    assert len(attempt.metrics.read_text().splitlines()) == SPEC.training.steps


def test_without_nsys_the_rank_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words) or sys.exit())
    with pytest.raises(SystemExit):
        profiled_rank.main([str(tmp_path)])
    assert started[0][-2:] == ["launch.train.worker", str(tmp_path)]
    with pytest.raises(EnvironmentFault, match=r"profile=nsys, but no nsys is on PATH: .* or set profile=none"):
        worker._set_up(SPEC, RankPlace(0, 1, torch.device("cpu")))


def test_ranges_name_phases_steps_micro_batches_and_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ranges: list[str] = []
    seen: list[tuple[str, ...]] = []

    def push(name: str) -> None:
        open_ranges.append(name)
        seen.append(tuple(open_ranges))

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: open_ranges.pop())
    monkeypatch.setattr(RANGES, "are_named", True)
    monkeypatch.setattr(RANGES, "_in_phase", False)
    for module in (event_log, step_metrics):
        monkeypatch.setattr(module, "JsonLines", lambda path: SimpleNamespace(write=lambda line: None))
    monkeypatch.setattr(worker, "_set_up", lambda spec, mesh: None)
    attempt, cpu = AttemptPaths(tmp_path / "1"), torch.device("cpu")
    worker.run(SPEC, RankPlace(0, 1, cpu), attempt, event_log.Recorder(attempt, 0, cpu))
    assert ("warmup", "step 0", "micro-batch 0 forward", "layer 1") in seen
    assert ("measure", "step 6", "micro-batch 1 backward") in seen
    assert [ranges[0] for ranges in seen if len(ranges) == 1][-3:] == ["measure", "probe", "teardown"]
    assert open_ranges == ["teardown"]
