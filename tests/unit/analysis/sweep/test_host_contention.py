"""Test which other runs shared the host with timed runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analysis.records.load import load
from analysis.sweep.host_contention import HostContention, neighbours_of
from analysis.sweep.judge_cells import compare_cells
from launch.contract.paths import SweepPaths
from tests.records import RUN_SECONDS, AttemptRecord, Edit, write_sweep
from tests.report_text import report_text


def swept(root: Path, edit: Edit) -> SweepPaths:
    """Return two workloads of eager, graphed, graphed, eager, a minute each. ``edit`` changes the attempts of the
    second."""

    def edit_second(record: AttemptRecord) -> None:
        assert record.outcome is not None
        if record.outcome.allocation == "bundle001":
            edit(record)

    return write_sweep(root, workloads=2, edit=edit_second)


def later(seconds: float) -> Edit:
    def move(record: AttemptRecord) -> None:
        assert record.outcome is not None
        outcome = record.outcome
        record.outcome = replace(outcome, started=outcome.started + seconds, ended=outcome.ended + seconds)

    return move


def elsewhere(record: AttemptRecord) -> None:
    record.environment["hardware"]["hosts"] = ["host1"]


def unknown(record: AttemptRecord) -> None:
    del record.environment["hardware"]


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (later(0), HostContention(1.0, 1.0)),
        (later(4 * RUN_SECONDS), None),
        (elsewhere, None),
        (unknown, None),
        # The first minute of one workload and the last minute of the other do not overlap. Both are eager.
        (later(RUN_SECONDS), HostContention(0.5, 1.0)),
        (later(RUN_SECONDS / 2), HostContention(0.75, 1.0)),
        (later(3 * RUN_SECONDS), HostContention(0.5, 0.0)),
    ],
    ids=[
        "at once",
        "one after the other",
        "on another host",
        "on a host not named",
        "a run apart",
        "half a run",
        "at last",
    ],
)
def test_time_with_a_neighbour_is_counted_once(tmp_path: Path, edit: Edit, expected: HostContention | None) -> None:
    sweep = swept(tmp_path, edit)
    found = neighbours_of(compare_cells(load(sweep)))
    if expected is None:
        assert found is None
    else:
        assert found is not None and (found.eager, found.graphed) == pytest.approx((expected.eager, expected.graphed))
    text = report_text(sweep)
    assert ("ran on rank 0's host" in text) == (expected is not None)


def test_runs_of_one_allocation_are_no_neighbours(tmp_path: Path) -> None:
    assert neighbours_of(compare_cells(load(write_sweep(tmp_path)))) is None


def test_each_side_has_its_own_share(tmp_path: Path) -> None:
    """An eager run of another workload slows down a graphed run, and the other way round."""

    def beside_graphed(record: AttemptRecord) -> None:
        later(RUN_SECONDS if not record.spec.graphed else 100 * RUN_SECONDS)(record)

    found = neighbours_of(compare_cells(load(swept(tmp_path, beside_graphed))))
    assert found is not None
    # The host has four minutes of graphed runs. In one of them an eager run of the other workload runs too.
    assert found.graphed == pytest.approx(0.25) and found.eager == pytest.approx(0.25)
