"""Test ``repeats: auto``: when a bundle may stop, and that the report then shows the decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.report.report_data import report_data
from analysis.speed.confidence_interval import EvenSplit, interval_of
from analysis.sweep.early_stop import find_early_stop, main
from analysis.sweep.judge_sweep import judge_sweep
from launch.common.atomic_files import write_json
from launch.contract.bundle import BundleOrder, EarlyStop
from launch.contract.exit_codes import ExitCode
from launch.contract.outcomes import Outcome, outcome_to_json
from launch.contract.paths import BundlePaths, SweepPaths
from launch.contract.plan import Limits, read_plan
from launch.contract.records.digest import digest_records
from tests.records import AttemptRecord, Edit, unchanged, write_sweep

LOOKS = (2, 4, 6)


def auto(root: Path, made: int, edit: Edit = unchanged, **options: Any) -> tuple[SweepPaths, BundlePaths]:
    """Return a sweep with ``made`` of up to six repeats, and the bundle of its first workload."""

    def only_made(record: AttemptRecord) -> None:
        record.begun = record.spec.repeat < made
        edit(record)

    sweep = write_sweep(root, repeats=LOOKS[-1], edit=only_made, **options)
    plan = dataclasses.replace(read_plan(sweep), looks=LOOKS)
    write_json(sweep.plan, plan)
    first, *_ = plan.bundles
    order(sweep, dict.fromkeys(first.run_ids, 1))
    return sweep, sweep.bundle(first.bundle_id)


def order(sweep: SweepPaths, attempts: Mapping[str, int], **awaited: int) -> None:
    """Order ``attempts`` of runs of the first workload."""
    plan = read_plan(sweep)
    made = BundleOrder(
        plan.bundles[0].bundle_id,
        "",
        tuple(attempts.items()),
        Limits(),
        1,
        ("cpu",),
        precedents=plan.precedents,
        awaited=awaited,
    )
    write_json(sweep.bundle(made.bundle_id).order, made)


def graphed(change: Edit) -> Edit:
    return lambda record: change(record) if record.spec.graphed else None


def unsteady(record: AttemptRecord) -> None:
    """Make every other run half as fast."""
    for step in record.metrics:
        step["step_time_ms"] *= 1 + record.spec.repeat % 2


def slightly_faster(record: AttemptRecord) -> None:
    """Let a ratio of 1.25 become one of 1.1."""
    for step in record.metrics:
        step["step_time_ms"] *= 1.25 / 1.1


def diverge(record: AttemptRecord) -> None:
    for step in record.metrics[50:]:
        step["loss"] += 1.0


def fail(record: AttemptRecord) -> None:
    record.end(outcome="CUDA_OOM", phase="capture", failure_class="CUDA_OOM")


def misconfigured(record: AttemptRecord) -> None:
    """Fail by settings, so that the repeats after the first one are skipped."""
    record.begun = record.spec.repeat == 0
    record.end(outcome="CONFIG", phase="init", failure_class="UNSUPPORTED", repeats_alike=True)


@pytest.mark.parametrize(
    ("made", "edit", "stops"),
    [
        (2, unchanged, True),
        (4, unchanged, True),
        (1, unchanged, False),
        (3, unchanged, False),
        (6, unchanged, False),
        (2, graphed(slightly_faster), False),
        (4, graphed(slightly_faster), True),
        (2, graphed(unsteady), False),
        (2, graphed(diverge), True),
        (2, graphed(fail), True),
        (2, graphed(misconfigured), True),
        (2, lambda record: None if record.spec.graphed else misconfigured(record), False),
        (2, lambda record: None if record.spec.graphed else fail(record), False),
        (2, graphed(lambda record: record.end(outcome="NODE_FAIL")), False),
    ],
    ids=[
        "faster, 2", "faster, 4", "no look at 1", "no look at 3", "all are made", "slightly, 2", "slightly, 4", "unsteady", "diverged", "graphed runs fail", "a repeat is skipped", "all later runs are skipped by their eager baseline",
        "also once two eager runs have failed alike", "a node fails",
    ],
)  # fmt: skip
def test_a_bundle_stops_at_a_look_where_its_verdicts_are_final(
    tmp_path: Path, made: int, edit: Edit, stops: bool
) -> None:
    sweep, bundle = auto(tmp_path, made, edit, device="cuda")
    later = tuple(run_id for cell in read_plan(sweep).cells for run_id in cell.run_ids[made:])
    assert find_early_stop(bundle) == (EarlyStop(made, 6, later) if stops else None)


def test_one_failure_beside_a_success_settles_nothing(tmp_path: Path) -> None:
    _, bundle = auto(tmp_path, 2, graphed(lambda record: fail(record) if record.spec.repeat else None), device="cuda")
    assert find_early_stop(bundle) is None


def test_no_look_is_taken_amid_a_repeat(tmp_path: Path) -> None:
    """This happens if a bundle was resumed after the first run of its third repeat."""
    sweep, bundle = auto(tmp_path, 2)
    (sweep.run(read_plan(sweep).cells[0].run_ids[2]).attempt(1).root).mkdir(parents=True)
    assert find_early_stop(bundle) is None


def test_a_command_that_is_tried_again_elsewhere_delays_no_look(tmp_path: Path) -> None:
    """By the failure that is being tried again, all later repeats would be skipped, and the bundle would look complete."""
    sweep, bundle = auto(tmp_path, 2, device="cuda")
    plan = read_plan(sweep)
    eager, compiled = plan.cells
    eager = dataclasses.replace(eager, same_command="other")
    write_json(sweep.plan, dataclasses.replace(plan, cells=(eager, compiled)))
    attempt = sweep.run("other-r0").attempt(1)
    attempt.root.mkdir(parents=True)
    failure = Outcome("CONFIG", "init", "a", 1.0, 2.0, failure_class="OPTIONS", repeats_alike=True)
    write_json(attempt.outcome, outcome_to_json(attempt, failure))
    order(sweep, dict.fromkeys(plan.bundles[0].run_ids, 1), **{"other-r0": 2})
    assert find_early_stop(bundle) is not None
    assert not any(result.skipped for result in judge_sweep(sweep).results), "nor does a report say so"
    order(sweep, dict.fromkeys(plan.bundles[0].run_ids, 1))
    assert find_early_stop(bundle) is None


@pytest.mark.parametrize(("edit", "stops"), [(diverge, True), (unsteady, False)])
def test_a_cell_that_is_tried_again_after_the_others_may_stop_early(tmp_path: Path, edit: Edit, stops: bool) -> None:
    """It had failed, so its baseline's repeats were all made. They are ordered again, for its own."""

    def mended(record: AttemptRecord) -> None:
        first, again = record.spec.repeat < 2, record.spec.cuda_graph.impl == "full_iteration"
        record.begun = first or not again
        record.number = 2 if first and not record.spec.graphed else 1
        if again:
            edit(record)

    sweep, bundle = auto(tmp_path, 6, mended, device="cuda", impls=("torch_compile", "full_iteration"))
    eager, complete, again = read_plan(sweep).cells
    order(sweep, dict.fromkeys(eager.run_ids, 2) | dict.fromkeys(again.run_ids, 1))
    later = tuple(run_id for cell in (eager, complete, again) for run_id in cell.run_ids[2:])
    assert find_early_stop(bundle) == (EarlyStop(2, 6, later) if stops else None)
    if stops:
        main(bundle.path)
        assert [len(result.runs) for result in judge_sweep(sweep).results] == [6, 6, 2]


def test_the_report_of_a_stopped_bundle_says_why_and_misses_nothing(tmp_path: Path) -> None:
    sweep, bundle = auto(tmp_path, 2, device="cuda")
    before = digest_records(sweep, read_plan(sweep).cell_of_run())
    assert report_data(judge_sweep(sweep)).summary.exit_code == ExitCode.UNFINISHED
    main(bundle.path)
    summary = report_data(judge_sweep(sweep)).summary
    assert (summary.exit_code, summary.unfinished_runs) == (ExitCode.PASS, 0)
    assert (
        "Stopped after 2 of up to 6 pairs: speed and loss verdicts of A1 are settled (sequential rule, "
        "error at most 5% over 3 looks)." in summary.notes
    )
    assert digest_records(sweep, read_plan(sweep).cell_of_run()) != before, "the report is not fresh any more"


def test_a_damaged_answer_is_none_and_a_run_that_was_made_counts(tmp_path: Path) -> None:
    sweep, bundle = auto(tmp_path, 3)
    runs = tuple(run_id for cell in read_plan(sweep).cells for run_id in cell.run_ids[2:])
    write_json(bundle.early_stop, EarlyStop(2, 6, runs))
    assert [len(result.runs) for result in judge_sweep(sweep).results] == [3, 3]
    bundle.early_stop.write_text('{"repeats": 2')
    assert [len(result.runs) for result in judge_sweep(sweep).results] == [6, 6]


def test_what_another_bundle_shows_later_takes_no_verdict_away(tmp_path: Path) -> None:
    """By the rule for fixed repeats, unsteady cells of the other bundle would make this interval too wide."""

    def edit(record: AttemptRecord) -> None:
        if record.spec.graphed and record.spec.training.learning_rate > 1e-3:
            unsteady(record)

    sweep, bundle = auto(tmp_path, 2, edit, device="cuda", workloads=4)
    assert find_early_stop(bundle) is not None
    main(bundle.path)
    result = judge_sweep(sweep).results[1]
    assert result.speed.speedup is not None and result.speed.speedup.verdict == "FASTER"


@pytest.mark.parametrize(("workloads", "stops"), [(1, True), (8, False)])
def test_a_bundle_of_many_has_to_be_surer(tmp_path: Path, workloads: int, stops: bool) -> None:
    def slower_again(record: AttemptRecord) -> None:
        for step in record.metrics:
            step["step_time_ms"] *= 1 + 0.005 * record.spec.repeat

    _, bundle = auto(tmp_path, 4, graphed(slower_again), device="cuda", workloads=workloads)
    assert (find_early_stop(bundle) is not None) is stops


@settings(max_examples=50)
@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6), st.integers(1, 40), st.integers(1, 3))
def test_an_interval_is_the_wider_the_more_share_its_error(ratios: list[float], cells: int, looks: int) -> None:
    found = [
        interval_of(ratios, split) for split in (EvenSplit(), EvenSplit(cells, looks), EvenSplit(cells + 1, looks))
    ]
    lows, highs = zip(*filter(None, found), strict=True)
    assert list(lows) == sorted(lows, reverse=True) and list(highs) == sorted(highs)


def test_a_bound_is_a_number_however_many_cells_there_are() -> None:
    low, high = interval_of([1.0, 100.0], EvenSplit(100_000, 3)) or (0.0, 0.0)
    assert 0 < low < 1e-12 and 1e12 < high < float("inf")
