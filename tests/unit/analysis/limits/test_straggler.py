"""Test stragglers: a rank is compared with the other ranks of its pipeline stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.limits.straggler import Straggler, cell_straggler
from analysis.records.load import load
from analysis.sweep.judge_cells import compare_cells
from launch.contract.spec import Parallelism
from tests.records import EAGER_PROBE, UNTHROTTLED, AttemptRecord, write_sweep
from tests.report_text import report_text
from tests.unit.analysis.graphs.test_replay_check import change_probe
from tests.unit.analysis.limits.test_throttling import change_clocks


def found(root: Path, edit: Any, ranks: int = 4, layout: Parallelism | None = None) -> Straggler | None:
    sweep = write_sweep(root, device="cuda", impls=("torch",), ranks=ranks, edit=edit)
    if layout is None:
        return compare_cells(load(sweep))[0].speed.straggler
    runs = next(iter(load(sweep).runs.values()))
    return cell_straggler([run.attempt for run in runs if run.attempt], layout, 20.0)


def test_ranks_that_are_alike_hold_nobody_up(tmp_path: Path) -> None:
    assert found(tmp_path, change_probe(2, computing_ms=15.9)) is None


def test_the_rank_that_computes_longest_stands_out(tmp_path: Path) -> None:
    assert found(tmp_path, change_probe(2, computing_ms=17.5)) == Straggler(
        2, "computing", 17.5, EAGER_PROBE.computing_ms, "no"
    )


def test_it_is_said_whether_its_own_clocks_were_lowered(tmp_path: Path) -> None:
    hot = change_clocks(rank=2, throttled={"thermal": 0.3 * UNTHROTTLED.seconds})
    capped = change_clocks(rank=1, throttled={"power_cap": UNTHROTTLED.seconds})

    def slow_and_hot(run: AttemptRecord) -> None:
        for edit in (change_probe(2, computing_ms=17.5), hot, capped):
            edit(run)

    straggler = found(tmp_path, slow_and_hot)
    assert straggler and straggler.throttled == "heat 30%"


def test_a_slow_host_stands_out_too(tmp_path: Path) -> None:
    assert found(tmp_path, change_probe(3, host_ms=24.0)) == Straggler(3, "host", 24.0, 19.0, "no")


def test_hosts_that_wait_for_the_device_are_not_held_against_each_other(tmp_path: Path) -> None:
    def waits(run: AttemptRecord) -> None:
        change_probe(3, host_ms=24.0)(run)
        change_probe(0, host_ms=None)(run)

    assert found(tmp_path, waits) is None

    def computes_longest(run: AttemptRecord) -> None:
        waits(run)
        change_probe(2, computing_ms=17.5)(run)

    assert found(tmp_path / "computing", computes_longest) == Straggler(
        2, "computing", 17.5, EAGER_PROBE.computing_ms, "no"
    )


def test_one_slow_repeat_of_three_is_no_straggler(tmp_path: Path) -> None:
    def once(run: AttemptRecord) -> None:
        if run.spec.repeat == 1:
            change_probe(2, computing_ms=17.5)(run)

    sweep = write_sweep(tmp_path, device="cuda", ranks=4, repeats=3, edit=once)
    assert compare_cells(load(sweep))[0].speed.straggler is None


def test_stages_may_differ_in_their_work(tmp_path: Path) -> None:
    def longer_last_stage(run: AttemptRecord) -> None:
        for rank in (2, 3):
            change_probe(rank, computing_ms=30.0)(run)

    assert found(tmp_path, longer_last_stage, layout=Parallelism(pp=2, dp=2)) is None
    assert found(tmp_path / "one", longer_last_stage, layout=Parallelism(dp=4)) is not None


@pytest.mark.parametrize("layout", [Parallelism(pp=4), Parallelism()])
def test_a_rank_without_equals_is_held_against_nobody(tmp_path: Path, layout: Parallelism) -> None:
    assert found(tmp_path, change_probe(2, computing_ms=30.0), layout=layout) is None


def test_the_report_names_it(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, device="cuda", ranks=4, edit=change_probe(2, computing_ms=17.5))
    assert "rank 2 slows the others down: its GPU computes for 17.50 ms per step" in report_text(sweep)
