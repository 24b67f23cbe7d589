"""Test in which order a supervisor begins runs and judges verdicts, without ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.common.atomic_files import write_json
from launch.contract.bundle import BundleOrder
from launch.contract.outcomes import Outcome, outcome_to_json
from launch.contract.paths import AttemptPaths, BundlePaths, SweepPaths
from launch.contract.plan import Limits
from launch.supervise import supervisor
from launch.supervise.supervisor import Supervisor


def test_verdicts_are_judged_although_the_run_that_waits_for_them_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its eager baseline, no verdict needs the graphed repeats."""
    bundle = SweepPaths(tmp_path).bundle("b")
    bundle.root.mkdir(parents=True)
    runs = [f"{cell}-r{repeat}" for repeat in range(3) for cell in ("eager-0", "graphed-1")]
    order = BundleOrder("b", "w", tuple((run, 1) for run in runs), Limits(), 1, ("cpu",), looks=(runs[4],))
    write_json(bundle.order, order)
    begun: list[str] = []

    def run_attempt(_: Supervisor, run_id: str, attempt: AttemptPaths, *__: object) -> None:
        begun.append(run_id)
        fails = run_id.startswith("eager")
        record = Outcome("CONFIG" if fails else "COMPLETED", "init", "a", 1.0, 2.0, repeats_alike=fails)
        write_json(attempt.outcome, outcome_to_json(attempt, record))

    def judge(_: BundlePaths, give_up: object) -> None:
        begun.append("judged")

    slots = SimpleNamespace(names=("cpu",), release=lambda: None)
    monkeypatch.setattr(supervisor.host_slots, "acquire", lambda *_: slots)
    monkeypatch.setattr(supervisor.signal, "signal", lambda *_: None)
    monkeypatch.setattr(supervisor, "judge_verdicts", judge)
    monkeypatch.setattr(Supervisor, "_run_attempts", run_attempt)
    Supervisor(bundle, order, None).run()
    assert begun == ["eager-0-r0", "graphed-1-r0", "graphed-1-r1", "judged", "graphed-1-r2"]
