"""Test in which order a supervisor begins runs and judges verdicts, without ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.common.atomic_files import write_json
from launch.contract.bundle import BundleOrder
from launch.contract.outcomes import OUT_OF_MEMORY_IN_CHECK, Outcome, outcome_to_json
from launch.contract.paths import UNCHECKED, AttemptPaths, BundlePaths, SweepPaths
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

    _without_ranks(monkeypatch)
    monkeypatch.setattr(supervisor, "judge_verdicts", judge)
    monkeypatch.setattr(Supervisor, "_run_attempts", run_attempt)
    Supervisor(bundle, order, None).run()
    assert begun == ["eager-0-r0", "graphed-1-r0", "graphed-1-r1", "judged", "graphed-1-r2"]


def test_repeats_begin_without_step_checks_once_one_lacked_memory_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = SweepPaths(tmp_path).bundle("b")
    bundle.root.mkdir(parents=True)
    runs = ("eager-0-r0", "graphed-1-r0", "other-2-r0", "graphed-1-r1", "eager-0-r1", "graphed-1-r2")
    order = BundleOrder("b", "w", tuple((run, 1) for run in runs), Limits(), 1, ("cpu",))
    write_json(bundle.order, order)
    begun: list[tuple[str, int, Mapping[str, str]]] = []

    def run_attempt(
        _: Supervisor,
        attempt: AttemptPaths,
        allocation: str,
        slots: object,
        added: Mapping[str, str],
        before: Callable[[Outcome], None],
    ) -> None:
        begun.append((attempt.run_id, attempt.number, added))
        lacks = attempt.run_id.startswith("graphed") and UNCHECKED not in added
        message = "in the check of step 4, where other ranks wait: Tried to allocate 2.00 GiB"
        record = Outcome("COMPLETED", "teardown", allocation, 1.0, 2.0)
        if lacks:
            record = Outcome("CUDA_OOM", "settle", allocation, 1.0, 2.0, 0, OUT_OF_MEMORY_IN_CHECK, message)
        before(record)
        write_json(attempt.outcome, outcome_to_json(attempt, record))

    _without_ranks(monkeypatch)
    monkeypatch.setattr(Supervisor, "_run_attempt", run_attempt)
    Supervisor(bundle, order, None).run()
    unchecked = {UNCHECKED: str(2**31)}
    assert begun == [
        ("eager-0-r0", 1, {}), ("graphed-1-r0", 1, {}), ("graphed-1-r0", 2, unchecked), ("other-2-r0", 1, {}),
        ("graphed-1-r1", 1, unchecked), ("eager-0-r1", 1, {}), ("graphed-1-r2", 1, unchecked),
    ]  # fmt: skip


def _without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = SimpleNamespace(names=("cpu",), release=lambda: None)
    monkeypatch.setattr(supervisor.host_slots, "acquire", lambda *_: slots)
    monkeypatch.setattr(supervisor.signal, "signal", lambda *_: None)
