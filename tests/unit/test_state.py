"""States of runs, told from what stands on disk, with locks held by this very process."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Optional

import pytest

from launch.files import write_json
from launch.lock import Lock, this_process
from launch.record import BundleOrder, BundlePaths, Limits, Outcome, Plan, SweepPaths, order_to_json, read_plan
from orchestrator.errors import SystemFault
from orchestrator.state import live_runs, newest_change, read_states
from tests.records import AttemptRecord, write_sweep


class Sweep:
    """One bundle of eager, compiled, eager, compiled; nothing of it begun."""

    def __init__(self, root: Path) -> None:
        def unbegun(record: AttemptRecord) -> None:
            record.begun = False

        self.paths = write_sweep(root / "written", steps=4, edit=unbegun)
        self.plan: Plan = read_plan(self.paths)
        (planned,) = self.plan.bundles
        self.run_ids = planned.run_ids
        self.bundle: BundlePaths = self.paths.bundle(planned.bundle_id)

    def order(self, *schedule: tuple[int, int]) -> None:
        """``schedule``: (index of the run, attempt)."""
        pairs = tuple((self.run_ids[run], attempt) for run, attempt in schedule)
        order = BundleOrder(self.bundle.root.name, "workload", pairs, Limits(), 1, ("cpu",))
        write_json(self.bundle.order, order_to_json(order))

    def begin(self, run: int, attempt: int = 1, outcome: Optional[str] = None) -> None:
        paths = self.paths.run(self.run_ids[run]).attempt(attempt)
        paths.logs.mkdir(parents=True)
        if outcome:
            record = Outcome(outcome, "measure", "a", 1.0, time.time())  # type: ignore[arg-type]
            write_json(paths.outcome, dataclasses.asdict(record))

    def states(self) -> list[str]:
        states = read_states(self.paths, self.plan)
        assert tuple(states) == self.run_ids
        return [state.name + ("*" if state.alive else "") for state in states.values()]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def kill(lock: Lock, path: Path) -> None:
    """What a killed holder leaves: a free lock that names a process which is no more."""
    lock.release()
    write_json(path, dataclasses.asdict(dataclasses.replace(this_process(), started=1)))


def taken(path: Path) -> Lock:
    lock = Lock.try_acquire(path)
    assert lock is not None
    return lock


def test_a_run_from_the_plan_to_its_outcome(sweep: Sweep) -> None:
    assert sweep.states() == ["PLANNED"] * 4
    sweep.order((0, 1), (1, 1))
    assert sweep.states() == ["PLANNED"] * 4, "ordered, but nobody lives to begin it"
    queue = taken(sweep.paths.queue_lock)
    assert sweep.states() == ["QUEUED*", "QUEUED*", "PLANNED", "PLANNED"]
    taken(sweep.bundle.lock)
    queue.release()
    assert sweep.states() == ["QUEUED*", "QUEUED*", "PLANNED", "PLANNED"]
    sweep.begin(0)
    assert sweep.states() == ["RUNNING*", "QUEUED*", "PLANNED", "PLANNED"]
    sweep.begin(1, outcome="COMPLETED")
    assert sweep.states() == ["RUNNING*", "COMPLETED", "PLANNED", "PLANNED"]


def test_a_run_whose_supervisor_died_is_interrupted_even_while_another_one_lives(sweep: Sweep) -> None:
    sweep.order((0, 1), (1, 1))
    first = taken(sweep.bundle.lock)
    sweep.begin(0)
    kill(first, sweep.bundle.lock)
    assert sweep.states()[:2] == ["INTERRUPTED", "PLANNED"]
    time.sleep(0.05)  # file systems keep time in ticks
    taken(sweep.bundle.lock)
    assert sweep.states()[:2] == ["INTERRUPTED", "QUEUED*"]
    sweep.begin(1)
    assert sweep.states()[:2] == ["INTERRUPTED", "RUNNING*"]


def test_another_attempt_is_the_run_s_state(sweep: Sweep) -> None:
    sweep.begin(0, outcome="FAILED")
    sweep.order((0, 2))
    assert sweep.states()[0] == "FAILED"
    taken(sweep.bundle.lock)
    assert sweep.states()[0] == "QUEUED*"
    sweep.begin(0, attempt=2, outcome="COMPLETED")
    assert sweep.states()[0] == "COMPLETED"
    assert read_states(sweep.paths, sweep.plan)[sweep.run_ids[0]].next_attempt == 3


def test_ten_attempts_are_counted_as_numbers(sweep: Sweep) -> None:
    for attempt in range(1, 11):
        sweep.begin(0, attempt, outcome="FAILED")
    assert read_states(sweep.paths, sweep.plan)[sweep.run_ids[0]].next_attempt == 11


def test_a_cancelled_bundle(sweep: Sweep) -> None:
    sweep.order((0, 1), (1, 1))
    taken(sweep.paths.queue_lock)
    taken(sweep.bundle.lock)
    sweep.begin(0)
    sweep.bundle.cancel.touch()
    assert sweep.states()[:2] == ["RUNNING*", "CANCELLED"], "a run that has begun ends first"


def test_a_damaged_outcome_is_none_and_a_damaged_order_is_a_fault(sweep: Sweep) -> None:
    sweep.begin(0, outcome="COMPLETED")
    sweep.paths.run(sweep.run_ids[0]).attempt(1).outcome.write_text('{"outcome": "COMPLETED"}')
    assert sweep.states()[0] == "INTERRUPTED"
    sweep.order((1, 1))
    taken(sweep.paths.queue_lock)
    sweep.bundle.order.write_text('{"schedule": []}')
    with pytest.raises(SystemFault, match=r"bundle\.json: not an order of this version .*; delete it"):
        sweep.states()


def test_live_runs_are_of_all_bundles_on_disk(sweep: Sweep) -> None:
    sweep.order((0, 1), (1, 1))
    assert list(live_runs(sweep.paths)) == []
    taken(sweep.paths.queue_lock)
    forgotten = sweep.paths.bundle("of-an-earlier-plan")
    order = BundleOrder("of-an-earlier-plan", "workload", (("run-r0", 1),), Limits(), 1, ("cpu",))
    write_json(forgotten.order, order_to_json(order))
    assert dict(live_runs(sweep.paths)) == {sweep.bundle: list(sweep.run_ids[:2]), forgotten: ["run-r0"]}


def test_what_changed_last(sweep: Sweep) -> None:
    def newest() -> float:
        return newest_change(sweep.paths, read_states(sweep.paths, sweep.plan).values())

    assert newest() == 0
    sweep.begin(0, outcome="COMPLETED")
    ended = newest()
    assert ended == pytest.approx(time.time(), abs=5)
    folder = sweep.paths.run(sweep.run_ids[1]).root / "attempts"
    sweep.begin(1)
    os.utime(folder, (ended + 10, ended + 10))
    assert newest() == pytest.approx(ended + 10), "an attempt that was begun and lost"


def test_sweep_paths_alone_tell_nothing(tmp_path: Path) -> None:
    assert list(live_runs(SweepPaths(tmp_path / "nowhere"))) == []
