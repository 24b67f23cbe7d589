"""Test which cell of a task comes first, what is not ranked, and which cells may be as fast as the first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.memory.peaks import CellMemory, PhasePeak
from analysis.records.load import load
from analysis.records.run import EndedAttempt, Run
from analysis.report.headline import headline
from analysis.report.summary import summarise
from analysis.report.write_report import write_report
from analysis.speed.step_time import StepTime
from analysis.sweep.cell_results import CellResult, CellSpeed
from analysis.sweep.judge_cells import compare_cells
from analysis.sweep.labels import task_words
from analysis.sweep.loss_trajectory import LossTrajectory, describe_divergence
from analysis.sweep.ranking import Ranking, rank
from launch.contract.outcomes import Outcome
from launch.contract.spec import Parallelism, Placement, RunSpec, Training, spec_to_json
from tests.records import GIB, AttemptRecord, workload_spec, write_sweep, written_cell
from tests.unit.analysis.graphs.test_replay_check import change_probe

TIMES = {1e-3: (20.0, 16.0), 2e-3: (14.0, 11.0)}


def timed(run: AttemptRecord) -> None:
    """Set equal losses for both workloads, and one step time for all steps of a run. The second repeat is one percent
    slower."""
    eager, graphed = TIMES[run.spec.training.learning_rate]
    for step in run.metrics:
        step["loss"] = 5.0 - step["step"] / 100
        step["step_time_ms"] = (graphed if run.spec.graphed else eager) * (1 + 0.01 * run.spec.repeat)
    change_probe(0, busy_ms=5.0, computing_ms=5.0)(run)


def as_one_task(results: tuple[CellResult, ...]) -> list[CellResult]:
    return [replace(result, cell=replace(result.cell, task_id="same")) for result in results]


def ranked(root: Path, edit: Any = timed, **options: Any) -> Ranking:
    (ranking,) = rank(
        as_one_task(compare_cells(load(write_sweep(root, workloads=2, device="cuda", edit=edit, **options))))
    )
    return ranking


def test_the_shortest_step_comes_first_across_workloads(tmp_path: Path) -> None:
    ranking = ranked(tmp_path, impls=("torch",))
    assert [cell.label for cell in ranking.cells] == [
        "torch, lr 0.002", "eager, lr 0.002", "torch, lr 0.001", "eager, lr 0.001",
    ]  # fmt: skip
    assert ranking.best.step == StepTime(
        pytest.approx((11.0 * 11.11) ** 0.5), pytest.approx(11.0), pytest.approx(11.11), 2, ("bundle001",)
    )
    assert ranking.allocations == 2
    assert ranking.best.tokens_per_second_per_rank == pytest.approx(8 * 128e3 / (11.0 * 11.11) ** 0.5)
    assert not ranking.not_slower
    assert [cell.on_pareto_front for cell in ranking.cells] == [True, True, False, False]


def test_runs_that_overlap_in_time_are_not_told_apart(tmp_path: Path) -> None:
    def noisy(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = 20.0 + 2 * run.spec.repeat + run.spec.training.learning_rate * 1000

    ranking = ranked(tmp_path, noisy, impls=("torch",))
    assert {cell.against_best for cell in ranking.cells[1:]} == {"undecided"}


def test_a_pair_is_told_apart_by_its_paired_speed_up(tmp_path: Path) -> None:
    """Repeats differ more than eager and graphed runs do, and all pairs agree on that ratio."""

    def drifting(run: AttemptRecord) -> None:
        timed(run)
        for step in run.metrics:
            slower = 10.0 if run.spec.training.learning_rate == 1e-3 else 1.0
            step["step_time_ms"] = slower * (20.0 + 2 * (run.spec.repeat in (1, 2))) / (1.05 if run.spec.graphed else 1)

    ranking = ranked(tmp_path, drifting, impls=("torch",), repeats=4)
    first, second = ranking.cells[:2]
    assert second.step.low < first.step.high
    assert (second.label, second.against_best) == ("eager, lr 0.002", "slower")


@pytest.mark.parametrize(("apart", "told"), [(1.03, False), (1.08, True)])
def test_cells_of_other_allocations_are_level_within_the_allowance(tmp_path: Path, apart: float, told: bool) -> None:
    """Runs of one allocation are alike, and the effect of the allocation itself is unknown."""

    def edit(run: AttemptRecord) -> None:
        timed(run)
        slow = run.spec.training.learning_rate == 2e-3
        for step in run.metrics:
            step["step_time_ms"] = (20.0 if not run.spec.graphed else 16.0) * (apart if slow else 1.0)

    first, second = ranked(tmp_path, edit, impls=("torch",)).cells[:2]
    assert (first.label, second.label) == ("torch, lr 0.001", "torch, lr 0.002")
    assert second.against_best == ("slower" if told else "undecided")


@pytest.mark.parametrize(
    ("gains", "order", "said"),
    [
        ((1.02, 1.02), "slower", ""),
        ((1.005, 1.005), "equal", "it is within 1% of 1 other cell"),
        ((1.0, 1.05), "undecided", "1 other cell may be as fast"),
    ],
)
def test_graphed_cells_of_a_workload_are_told_apart_by_their_repeats(
    tmp_path: Path, gains: tuple[float, float], order: str, said: str
) -> None:
    """Repeats differ by 20%, in both cells alike. One cell is faster by ``gains``, repeat by repeat."""

    def shared(run: AttemptRecord) -> None:
        timed(run)
        faster = {"none": 1.0, "torch": 1.3}.get(run.spec.cuda_graph.impl, 1.3 * gains[run.spec.repeat % 2])
        for step in run.metrics:
            step["step_time_ms"] = 20.0 * (1 + 0.2 * (run.spec.repeat in (1, 2))) / faster

    results = compare_cells(load(write_sweep(tmp_path, impls=("torch", "full_iteration"), edit=shared, repeats=4)))
    (ranking,) = rank(results)
    first, second, _ = ranking.cells
    assert (first.label, second.label) == ("full_iteration, lr 0.001", "torch, lr 0.001")
    assert second.step.low < first.step.high and second.against_best == order
    text = headline(results)
    assert said in text and ("other cell" in text) == bool(said)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (lambda step: 5.0, "5 nats apart in the first step, and the bound is 0.01"),
        (lambda step: 0.02 * (step == 1), "0.02 nats apart in the second step, and the bound is 0.01"),
        (lambda step: 0.02 * max(step - 1, 0), "1.17 nats apart in the mean over 120 steps, and the bound is 0.5"),
        (lambda step: 0.004, None),
        (lambda step: 10.0 * (step == 60), None),  # A change of kernels alone may cause such a spike.
    ],
)
def test_what_trains_something_else_is_not_ranked(tmp_path: Path, lost: Any, said: str | None) -> None:
    def otherwise(run: AttemptRecord) -> None:
        timed(run)
        for step in run.metrics:
            step["loss"] += lost(step["step"]) if run.spec.training.learning_rate == 2e-3 else 0.0

    ranking = ranked(tmp_path, otherwise, impls=("torch",))
    if said is None:
        assert ranking.best.label == "torch, lr 0.002"
        return
    assert [cell.label for cell in ranking.cells] == ["torch, lr 0.001", "eager, lr 0.001"]
    why = f"losses unlike those of eager, lr 0.001: {said}"
    assert ranking.not_ranked == (("eager, lr 0.002", why), ("torch, lr 0.002", why))


def described(own: tuple[float, ...], other: tuple[float, ...]) -> str:
    return describe_divergence(LossTrajectory(own, 3.0, 100), LossTrajectory(other, 3.0, 100))


def test_the_second_loss_may_differ_by_a_share_of_what_the_first_update_changed() -> None:
    """Numbers of GPT-OSS-20B in two engines, then of a learning rate that is 10% higher."""
    assert not described((12.6936, 11.4787), (12.6902, 11.4542))
    assert (
        described((12.6936, 11.4787), (12.6936, 11.3572))
        == "0.121 nats apart in the second step, and the bound is 0.0607"
    )
    # A side that did not update moves nothing, and gets no wider bound from the other side's update.
    assert (
        described((12.6936, 11.4787), (12.6936, 12.6936)) == "1.21 nats apart in the second step, and the bound is 0.01"
    )
    assert described((float("nan"), 11.0), (12.0, 11.0)) == "nan nats apart in the first step, and the bound is 0.01"
    assert not described((12.0,), (12.005,))


def test_paragraph_one_says_what_trains_something_else_and_does_not_name_it_fastest(tmp_path: Path) -> None:
    def otherwise(run: AttemptRecord) -> None:
        timed(run)
        for step in run.metrics:
            step["loss"] += 5.0 if run.spec.training.learning_rate == 2e-3 else 0.0

    results = as_one_task(
        compare_cells(load(write_sweep(tmp_path, workloads=2, edit=otherwise, impls=("torch_compile",))))
    )
    text = summarise(results).text
    assert (
        "**1 eager cell left out of the ranking**: `eager, lr 0.002` (losses unlike those of eager, lr 0.001: "
        "5 nats apart in the first step, and the bound is 0.01)."
    ) in text
    assert "Fastest" not in text


def test_where_eager_may_be_as_fast_no_other_cell_is_counted(tmp_path: Path) -> None:
    def unsteady(run: AttemptRecord) -> None:
        timed(run)
        for step in run.metrics:
            step["step_time_ms"] = 16.0 if run.spec.graphed else 18.0 + 4.0 * (run.spec.repeat % 2)

    text = headline(compare_cells(load(write_sweep(tmp_path, impls=("torch", "full_iteration"), edit=unsteady))))
    assert "; eager may be as fast. 2 of 2 configurations pass." in text


def test_a_single_run_tells_nothing_apart(tmp_path: Path) -> None:
    ranking = ranked(tmp_path / "two", impls=("torch",), repeats=1)
    assert ranking.not_slower == "3 others may be as fast"
    sweep = write_sweep(tmp_path / "one", impls=("torch", "full_iteration"), repeats=1, device="cuda", edit=timed)
    report = write_report(sweep)
    assert (
        "`torch` (A1) measured " in report.summary
        and "; one pair cannot separate a speed-up from drift over time; graphs can gain" in report.summary
    )
    markdown = report.markdown.read_text()
    assert "| place | name | cell |" in markdown and "| 3 (may be as fast as A" in markdown


def spoilt(run: AttemptRecord) -> None:
    timed(run)
    if run.spec.graphed and run.spec.training.learning_rate == 2e-3:
        run.metrics[90]["loss"] += 0.5
    if run.spec.graphed and run.spec.training.learning_rate == 1e-3 and run.spec.repeat == 1:
        run.outcome = Outcome("CUDA_OOM", "capture", "bundle000", 0.0, 1.0)


def test_what_does_not_pass_is_left_out_with_the_reason(tmp_path: Path) -> None:
    ranking = ranked(tmp_path, spoilt, impls=("torch",))
    assert [cell.label for cell in ranking.cells] == ["eager, lr 0.002", "eager, lr 0.001"]
    assert ranking.not_ranked == (("torch, lr 0.001", "COMPLETED x1, CUDA_OOM x1"), ("torch, lr 0.002", "DIVERGED"))


def test_tasks_are_ranked_apart_and_one_cell_alone_is_no_ranking(tmp_path: Path) -> None:
    results = compare_cells(load(write_sweep(tmp_path, workloads=2, device="cuda", edit=spoilt)))
    assert rank(results) == ()
    apart = rank(compare_cells(load(write_sweep(tmp_path / "all", workloads=2, device="cuda", edit=timed))))
    assert [len(ranking.cells) for ranking in apart] == [2, 2]


def test_other_machines_are_named(tmp_path: Path) -> None:
    def older(run: AttemptRecord) -> None:
        timed(run)
        if run.spec.training.learning_rate == 2e-3:
            run.environment["hardware"]["gpus"] = ["NVIDIA H100"]

    assert ranked(tmp_path, older).machines == ("hardware.gpus: NVIDIA H100 or NVIDIA H200",)
    assert ranked(tmp_path / "same").machines == ()


# --- made up from figures -------------------------------------------------------------------------------------------


def eager(number: int, milliseconds: float, peak: int, ranks: int = 1) -> CellResult:
    """Return an eager cell with this step time and memory peak."""
    spec = replace(
        workload_spec(0, "none", 120, device="cuda"),
        parallelism=Parallelism(dp=ranks),
        placement=Placement(device="cuda", nodes=1, ranks_per_node=ranks),
    )
    cell = replace(written_cell(spec, 1), label=f"cell {number}", workload_id=str(number), spec=spec_to_json(spec))
    memory = CellMemory("device", (PhasePeak("measure", peak, None, None, None),), None)
    run = Run("run", 0, 1, EndedAttempt(1, Outcome("COMPLETED", "teardown", "bundle", 0.0, 1.0), {}, (), ()))
    step = StepTime(milliseconds, milliseconds, milliseconds, 2, ("bundle",))
    return CellResult(cell, (run,), memory=memory, speed=CellSpeed(step))


@given(st.lists(st.tuples(st.floats(1, 100), st.integers(1, 100), st.sampled_from([1, 2, 4])), min_size=2, max_size=20))
def test_the_front_is_what_no_other_cell_beats(points: list[tuple[float, int, int]]) -> None:
    (ranking,) = rank([eager(i, time, peak * GIB, ranks) for i, (time, peak, ranks) in enumerate(points)])
    for cell in ranking.cells:
        own = points[int(cell.label.split()[1])]
        beaten = any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in points)
        assert cell.on_pareto_front != beaten
    assert [cell.step.milliseconds for cell in ranking.cells] == sorted(time for time, _, _ in points)


def test_fewer_ranks_may_do_more_each() -> None:
    (ranking,) = rank([eager(0, 10.0, GIB, ranks=4), eager(1, 25.0, GIB, ranks=1)])
    assert (ranking.best.label, ranking.most_of_a_rank.label) == ("cell 0", "cell 1")
    assert [cell.on_pareto_front for cell in ranking.cells] == [True, True]


# --- the report -----------------------------------------------------------------------------------------------------


def test_the_report_names_the_fastest_and_what_it_rests_on(tmp_path: Path) -> None:
    report = write_report(write_sweep(tmp_path, device="cuda", impls=("torch", "full_iteration"), edit=same_task_times))
    text = report.markdown.read_text().split("## Ranking")[1].split("\n## ")[0]
    assert "Fastest: A2, 12.00 ms per step on 1 GPU. The runs used 1 allocation." in text
    assert "| 3 | A0 | `eager, lr 0.001` | 1 | 20.00 ms (20.00 to 20.00) |" in text
    assert "Turn graphs on: `full_iteration` (A2) is 1.67x faster (" in report.summary
    (ranking,) = json.loads(report.json.read_text())["rankings"]
    assert [round(cell["relative"], 3) for cell in ranking["cells"]] == [1.0, 1.333, 1.667]


def same_task_times(run: AttemptRecord) -> None:
    change_probe(0, busy_ms=5.0, computing_ms=5.0)(run)
    for step in run.metrics:
        step["step_time_ms"] = {"none": 20.0, "torch": 16.0}.get(run.spec.cuda_graph.impl, 12.0)


def test_a_cpu_is_ranked_by_ratios_alone(tmp_path: Path) -> None:
    report = write_report(write_sweep(tmp_path, edit=same_task_times))
    text = report.markdown.read_text().split("## Ranking")[1].split("\n## ")[0]
    assert "1.67 (1.67 to 1.67)" in text
    assert " ms" not in text and "tokens/s" not in text
    (ranking,) = json.loads(report.json.read_text())["rankings"]
    assert "step_ms" not in ranking["cells"][0] and "tflops" not in ranking["cells"][0]


def test_a_task_in_8_bits_is_named_so() -> None:
    assert task_words(RunSpec(training=Training(precision="bf16"))).endswith(" bf16")
    assert task_words(RunSpec(training=Training(precision="bf16", fp8="delayed"))).endswith(" bf16, fp8 (delayed)")
