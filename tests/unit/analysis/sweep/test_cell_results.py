"""Test the way from the records of a sweep to verdicts, outcomes and exit codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis.records.load import load
from analysis.report.write_report import write_report
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import compare_cells, exit_code
from analysis.sweep.judge_sweep import judge_sweep
from analysis.verdict.noise import NoiseFloor
from launch.contract.exit_codes import ExitCode
from launch.contract.outcomes import Expectation, Outcome
from launch.contract.plan import Reason
from launch.contract.records.state_changes import StateChanges
from launch.contract.spec import RunSpec
from tests.records import AttemptRecord, Edit, Extra, attempt_record, unbegun, workload_spec, write_attempt, write_sweep
from tests.unit.analysis.sweep.judged_cell import (
    for_graphed,
    graphed_result,
    judged,
    other_code,
    verdict_in,
    verdict_of,
)

CANCELLED = Outcome("CANCELLED", "measure", "bundle000", 0.0, 1.0)
NO_LAUNCH = Outcome("ENVIRONMENT", "init", "bundle000", 0.0, 1.0, failure_class="LAUNCH", infrastructure=True)
OOM = Outcome("CUDA_OOM", "capture", "bundle000", 0.0, 1.0, rank=0, failure_class="cuda_oom", remedy="capture less")


def test_twins_that_agree_to_the_bit(tmp_path: Path) -> None:
    results = compare_cells(load(write_sweep(tmp_path)))
    result = results[1]
    assert result.verdict is not None and result.verdict.evidence is not None
    assert result.verdict.verdict == "BITWISE"
    found = result.verdict.evidence
    assert (found.eager_runs, found.graphed_runs, found.noise_floor) == (2, 2, NoiseFloor(2, 0.0, 0.0)), (
        "it is of all repeats"
    )
    assert result.outcome == "COMPLETED"
    assert result.graphs.replay is not None
    assert result.graphs.replay.summary == "not applicable on a CPU: 4 compiled functions, called 464 of 464 times"
    assert exit_code(results) == 0


def test_noise_within_the_margin_is_equivalent_and_worst_repeat_wins(tmp_path: Path) -> None:
    def noise(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 1:
            run.metrics[60]["loss"] += 2e-4

    result = judged(tmp_path, noise)
    assert [pair.verdict.verdict for pair in result.pairs] == ["BITWISE", "EQUIVALENT"]
    each = [pair.verdict.evidence for pair in result.pairs if pair.verdict.evidence]
    assert [(one.eager_runs, one.graphed_runs) for one in each] == [(2, 1), (2, 1)]
    assert result.verdict is not None and result.verdict.verdict == "EQUIVALENT"
    assert result.max_loss_difference == pytest.approx(2e-4)
    found = result.verdict.evidence
    assert found is not None and (found.eager_runs, found.graphed_runs, found.bitwise_prefix) == (2, 2, 56)
    assert [tested.metric for tested in found.tested] == ["loss", "grad_norm"]


def test_each_graphed_run_equal_to_an_eager_one_of_its_own_is_not_bitwise(tmp_path: Path) -> None:
    """Eager runs differ from each other, which no pair shows by itself."""

    def second(run: AttemptRecord) -> None:
        for step in run.metrics[60:] if run.spec.repeat else ():
            step["loss"] += 0.25

    sweep = write_sweep(tmp_path, edit=second)
    report, result = write_report(sweep), graphed_result(sweep)
    assert result.verdict is not None and result.verdict.evidence is not None
    assert result.verdict.verdict == "INCONCLUSIVE"
    assert "eager repeats differ among themselves: their loss by up to 0.25" in result.verdict.reason
    assert "graphed repeat 1 equals eager repeat 1 bit for bit, but eager repeats differ" in result.verdict.reason
    assert [pair.verdict.verdict for pair in result.pairs] == ["INCONCLUSIVE"] * 2
    assert "all 116 steps (eager repeats: first 56 of 116 steps)" in report.markdown.read_text()
    assert report.exit_code == 4


def test_of_repeats_by_two_versions_of_the_code_the_largest_differences_are_shown(tmp_path: Path) -> None:
    """Each version's repeats are judged apart. The cell gets the worse verdict."""

    def newer(run: AttemptRecord) -> None:
        if run.spec.repeat >= 2:
            run.environment["digests"]["code"] = "newer"
            run.metrics[70]["loss"] += (4e-4 if run.spec.graphed else 2e-4) * (run.spec.repeat - 2)
        elif run.spec.graphed:
            run.metrics[60]["loss"] += 1e-4

    eager, graphed = compare_cells(load(write_sweep(tmp_path, edit=newer, repeats=4)))
    assert graphed.verdict is not None and graphed.verdict.verdict == "EQUIVALENT"
    assert graphed.max_loss_difference == pytest.approx(3e-4)
    assert eager.loss.noise_floor is not None and (eager.loss.noise_floor.repeats, eager.loss.noise_floor.loss) == (
        2,
        pytest.approx(2e-4),
    )


def test_a_step_beyond_the_margin_is_of_the_repeat_that_has_it(tmp_path: Path) -> None:
    def far(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 1:
            run.metrics[60]["grad_norm"] *= 1.02

    result = judged(tmp_path, far)
    assert result.verdict is not None and result.verdict.verdict == "DIVERGED"
    assert result.verdict.reason.startswith("first at step 60: the gradient norm is")
    assert result.verdict.reason.endswith("(graphed repeat 1)")
    assert [pair.verdict.verdict for pair in result.pairs] == ["BITWISE", "DIVERGED"]


def test_the_more_cells_of_a_sweep_are_tested_the_surer_each_has_to_be(tmp_path: Path) -> None:
    def offset(run: AttemptRecord) -> None:
        """Make the verdict certain in two of the workloads, and give the others p-values of 0.03."""
        spread, mean = (1e-5, 1e-5) if run.spec.training.learning_rate < 2.5e-3 else (1e-4, 4.5e-4)
        for step in run.metrics:
            step["loss"] += (spread if run.spec.repeat else -spread) + (mean if run.spec.graphed else 0)

    words = []
    for workloads in (3, 4):
        sweep = write_sweep(tmp_path / str(workloads), workloads=workloads, edit=offset)
        results = [result for result in judge_sweep(sweep).results if result.verdict]
        words.append([result.verdict.verdict for result in results if result.verdict])
        assert [pair.verdict.verdict for result in results for pair in result.pairs] == [
            w for w in words[-1] for _ in "ab"
        ]
    assert words == [["EQUIVALENT"] * 3, ["EQUIVALENT"] * 2 + ["INCONCLUSIVE"] * 2]


def keep_parameters(run: AttemptRecord) -> None:
    """Keep the parameters: the optimizer never steps after the capture."""
    for event in (event for events in run.events.values() for event in events if event["kind"] == "parameters"):
        event["digest"] = "first"


def test_ranks_that_are_replicas_in_eager_runs_alone_are_a_divergence(tmp_path: Path) -> None:
    """A replay omits the reduction of gradients. Each rank then trains alone, and the mean loss stays nearly the same."""

    def edit(run: AttemptRecord) -> None:
        end_elsewhere(run, 0, 1, apart=run.spec.graphed and run.spec.repeat == 1)
        run.metrics[60]["loss"] += 1e-6 * run.spec.graphed

    found = verdict_of(tmp_path, edit, ranks=2)
    assert found.verdict == "DIVERGED" and "ranks 0, 1 end with the same parameters in eager" in found.reason


@pytest.mark.parametrize(
    ("scope", "step_checks", "lost", "verdict"),
    [
        (["forward_backward"], 0, False, "EQUIVALENT"),
        (["forward_backward", "optimizer"], 0, False, "INCONCLUSIVE"),
        (["forward_backward", "optimizer"], 3, False, "EQUIVALENT"),
        (["forward_backward", "optimizer"], 3, True, "INCONCLUSIVE"),
    ],
    ids=["not captured", "captured", "checked", "without memory for a check"],
)
def test_a_captured_optimizer_passes_only_if_the_loss_falls_or_checks_compare_it(
    tmp_path: Path, scope: list[str], step_checks: int, lost: bool, verdict: str
) -> None:
    """At a low learning rate, even updates in the wrong direction stay within the margin, although digests change."""

    def edit(run: AttemptRecord) -> None:
        towards = 1e-4 if run.spec.graphed else -1e-4
        shared = np.random.default_rng(0).normal(0, 0.02, len(run.metrics))
        own = np.random.default_rng([1, run.spec.repeat, run.spec.graphed]).normal(0, 2e-5, len(run.metrics))
        for step, batch, noise in zip(run.metrics, shared, own, strict=True):
            step["loss"] = 5 + batch + noise + towards * step["step"] / len(run.metrics)
        for event in (event for events in run.events.values() for event in events if "graphs" in event):
            event["graphs"]["effective_scope"] = scope
        for event in run.events[0]:
            if lost and event["kind"] == "step_check" and event["step"] == 62:
                event["check"] |= {"tensors": 0, "missing": 1}

    found = verdict_of(tmp_path, edit, step_checks=step_checks)
    assert found.verdict == verdict
    assert ("the variation between batches hides whether it learns" in found.reason) == (verdict == "INCONCLUSIVE")


def end_elsewhere(run: AttemptRecord, *ranks: int, apart: bool = False) -> None:
    """Change the result of the last update, or of an update of a parameter that no loss depends on."""
    for rank in ranks:
        digest = f"of repeat {run.spec.repeat}, {run.spec.cuda_graph.label}" + f", rank {rank}" * apart
        for event in run.events[rank]:
            if event["kind"] == "parameters" and event["digest"] == "last":
                event["digest"] = digest


@pytest.mark.parametrize(
    ("elsewhere", "verdict"),
    [
        (lambda spec: spec.graphed and spec.repeat == 1, "INCONCLUSIVE"),
        (lambda spec: spec.repeat == 1, "BITWISE"),
    ],
    ids=["a graphed run", "eager runs too"],
)
def test_equal_curves_with_other_parameters_at_the_end_are_not_bitwise(
    tmp_path: Path, elsewhere: Callable[[RunSpec], bool], verdict: str
) -> None:
    def edit(run: AttemptRecord) -> None:
        if elsewhere(run.spec):
            end_elsewhere(run, 0, 1)

    found = verdict_of(tmp_path, edit, ranks=2)
    assert found.verdict == verdict
    assert ("the parameters of ranks 0, 1 differ after the last step" in found.reason) == (verdict == "INCONCLUSIVE")


@pytest.mark.parametrize("near", [0.0, 1e-5])
@pytest.mark.parametrize("lost", ["first", "last"])
@pytest.mark.parametrize("graphed", [True, False])
def test_runs_of_which_one_has_no_digests_of_its_parameters_do_not_pass(
    tmp_path: Path, graphed: bool, lost: str, near: float
) -> None:
    def edit(run: AttemptRecord) -> None:
        run.metrics[60]["loss"] += near * run.spec.graphed
        if run.spec.graphed == graphed:
            run.events[1] = [event for event in run.events[1] if event.get("digest") != lost]

    found = verdict_of(tmp_path, edit, ranks=2)
    side = "graphed" if graphed else "eager"
    assert found.verdict == "INCONCLUSIVE" and found.fix.startswith("run the pair again")
    assert f"the {side} run has no digests of the parameters of rank 1, but other runs have" in found.reason


@pytest.mark.parametrize("lost", ["graphed", "eager", "eager of another repeat"])
def test_runs_of_which_one_has_no_record_of_other_state_do_not_pass(tmp_path: Path, lost: str) -> None:
    """Otherwise a lost record hides running statistics that a replay does not update."""

    def edit(run: AttemptRecord) -> None:
        changes = StateChanges("" if run.spec.graphed else "changed", 0 if run.spec.graphed else 3, {}, (), ())
        event = {**run.events[0][-1], "kind": "other_state", "changes": dataclasses.asdict(changes)}
        if lost != ("graphed" if run.spec.graphed else ("eager", "eager of another repeat")[run.spec.repeat]):
            run.events[0].append(event)

    found = verdict_of(tmp_path, edit)
    assert found.verdict == "INCONCLUSIVE" and found.fix.startswith("run the pair again")
    assert (
        "has no record of buffers, or weights that no optimizer steps, of rank 0, but other runs have" in found.reason
    )


@pytest.mark.parametrize("near", [0.0, 1e-5])
def test_a_graphed_optimizer_that_never_steps_diverges_however_near_the_losses_are(tmp_path: Path, near: float) -> None:
    def edit(run: AttemptRecord) -> None:
        run.metrics[60]["loss"] += near * run.spec.graphed
        if run.spec.graphed:
            keep_parameters(run)

    sweep = write_sweep(tmp_path, edit=edit)
    found = verdict_in(sweep)
    assert found.verdict == "DIVERGED" and "the graphed optimizer does not step: the parameters of rank" in found.reason
    assert "does not step" in write_report(sweep).markdown.read_text()


def test_where_no_run_changes_its_parameters_there_is_nothing_to_compare(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, keep_parameters)
    assert verdict.verdict == "INCOMPARABLE" and "nothing is learnt" in verdict.reason


def test_deterministic_mode_asks_for_equality_before_the_capture_as_well(tmp_path: Path) -> None:
    def other_start(run: AttemptRecord) -> None:
        run.metrics[1]["loss"] += 1e-9

    found = [verdict_of(tmp_path / str(mode), for_graphed(other_start), deterministic=mode) for mode in (False, True)]
    assert [verdict.verdict for verdict in found] == ["BITWISE", "INCOMPARABLE"]


def test_deterministic_mode_asks_for_equality_to_the_bit(tmp_path: Path) -> None:
    def near(run: AttemptRecord) -> None:
        run.metrics[60]["loss"] += 1e-6

    found = verdict_of(tmp_path / "near", for_graphed(near), deterministic=True)
    assert found.verdict == "DIVERGED" and found.deviation is not None and found.deviation.step == 60
    assert verdict_in(write_sweep(tmp_path / "same", deterministic=True)).verdict == "BITWISE"


def forked(which: Callable[[RunSpec], bool], ends_apart: bool = False) -> Edit:
    """Return an edit that changes the runs ``which`` alike from step 60 on, and with ``ends_apart`` an eager run's last update."""

    def edit(run: AttemptRecord) -> None:
        for step in run.metrics[60:] if run.spec.graphed and which(run.spec) else ():
            step["loss"] += 1e-6
        if ends_apart and not run.spec.graphed and run.spec.repeat == 1:
            run.events[0] = [
                {**event, "digest": "other"} if event.get("digest") == "last" else event for event in run.events[0]
            ]

    return edit


def forked_cells(root: Path, edit: Edit) -> list[CellResult]:
    sweep = write_sweep(
        root, impls=("torch", "full_iteration"), device="cuda", repeats=3, deterministic=True, edit=edit
    )
    return [result for result in compare_cells(load(sweep)) if result.cell.graphed]


def test_a_fork_that_only_some_graphed_repeats_take_accuses_no_graph(tmp_path: Path) -> None:
    """Three eager runs of a kernel that is not deterministic may be equal by luck."""
    cells = forked_cells(tmp_path, forked(lambda spec: spec.repeat != (2 if spec.cuda_graph.impl == "torch" else 0)))
    for cell, equal, other in zip(cells, (2, 0), ("repeat 1 of full_iteration", "repeat 0 of torch"), strict=True):
        assert cell.verdict is not None and cell.verdict.verdict == "INCONCLUSIVE"
        assert cell.verdict.reason.startswith(f"graphed repeat {equal} equals eager bit for bit, unlike graphed repeat")
        assert f"equals {other} bit for bit, so both may have one cause" in cell.verdict.reason
        words = {pair.repeat: pair.verdict.verdict for pair in cell.pairs}
        assert words == {repeat: "BITWISE" if repeat == equal else "INCONCLUSIVE" for repeat in range(3)}


def test_eager_runs_that_end_with_different_parameters_are_not_deterministic(tmp_path: Path) -> None:
    """Their curves may be equal all the same."""
    same, apart = (
        forked_cells(tmp_path / str(a), forked(lambda _: True, ends_apart=a))[0].verdict for a in (False, True)
    )
    assert same is not None and same.verdict == "DIVERGED" and "repeat 0 of full_iteration" in same.reason
    assert apart is not None and apart.verdict == "INCONCLUSIVE"
    assert "eager repeats end with different parameters, so a kernel is not deterministic" in apart.reason


def test_one_nan_in_one_repeat_of_the_graphed_cell_diverges(tmp_path: Path) -> None:
    def nan(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 1:
            run.metrics[80]["loss"] = float("nan")

    found = verdict_of(tmp_path, nan)
    assert (found.verdict, found.deviation and found.deviation.step) == ("DIVERGED", 80)
    assert found.reason.startswith("repeat 1")


def test_all_nan_on_both_sides_does_not_pass(tmp_path: Path) -> None:
    def all_nan(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["loss"] = float("nan")

    sweep = write_sweep(tmp_path, edit=all_nan)
    assert verdict_in(sweep).verdict == "INCOMPARABLE"
    # A run with a NaN never ends as COMPLETED. A record that claims this is wrong, whatever the pair's verdict.
    assert exit_code(compare_cells(load(sweep))) == 3


def test_a_run_that_ended_at_its_nan_diverges_though_it_gives_no_proof(tmp_path: Path) -> None:
    def stopped(run: AttemptRecord) -> None:
        run.metrics[70]["loss"] = float("nan")
        del run.metrics[71:]
        run.events[0] = [event for event in run.events[0] if event["kind"] != "proof"]
        run.outcome = Outcome("NUMERIC", "measure", "bundle000", 0.0, 1.0, rank=0, message="loss is nan at step 70")

    result = judged(tmp_path, for_graphed(stopped))
    assert result.verdict is not None and (result.verdict.verdict, result.unexpected) == ("DIVERGED", True)


def test_a_later_attempt_counts_unless_infrastructure_or_the_user_ended_it(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    spec = dataclasses.replace(workload_spec(0, "torch_compile", 120), repeat=0)
    for number, outcome, counts in ((2, CANCELLED, 1), (3, NO_LAUNCH, 1), (4, OOM, 4)):
        later = attempt_record(spec)
        later.number, later.outcome = number, outcome
        write_attempt(sweep, later)
        assert [run.attempt and run.attempt.number for run in graphed_result(sweep).runs] == [counts, 1]
    assert exit_code(compare_cells(load(sweep))) == 3, "a failure after a success is a failure"
    again = attempt_record(spec, allocation="another")
    again.number = 10
    write_attempt(sweep, again)
    result = graphed_result(sweep)
    assert [run.attempt and run.attempt.number for run in result.runs] == [10, 1]
    assert result.pairs[0].speed.reason == "the runs were in different allocations"
    assert result.speed.speedup is not None
    assert (result.speed.speedup.pairs, result.speed.speedup.verdict) == (1, "INCONCLUSIVE")


def test_each_graphed_run_meets_the_eager_attempt_of_its_own_allocation(tmp_path: Path) -> None:
    """An eager baseline that is retried for one graphed cell leaves the pairs of other cells as they are."""
    sweep = write_sweep(tmp_path)
    for repeat in range(2):
        again = attempt_record(dataclasses.replace(workload_spec(0, "none", 120), repeat=repeat), allocation="later")
        again.number = 2
        other_code(again)
        write_attempt(sweep, again)
    result = graphed_result(sweep)
    assert result.verdict is not None and result.verdict.verdict == "BITWISE"
    assert result.speed.speedup is not None and result.speed.speedup.pairs == 2


def test_expecting_a_hang_at_the_end_does_not_spare_the_comparison(tmp_path: Path) -> None:
    def hung(run: AttemptRecord) -> None:
        run.outcome = Outcome("TEARDOWN_HANG", "teardown", run.outcome.allocation if run.outcome else "", 0.0, 1.0)
        run.metrics[80]["loss"] = float("nan")

    assert verdict_of(tmp_path, for_graphed(hung), expect=Expectation("TEARDOWN_HANG")).verdict == "DIVERGED"


def failing(outcome: Outcome) -> Edit:
    def fail(run: AttemptRecord) -> None:
        run.outcome = outcome
        del run.metrics[3:]

    return fail


def interrupted(run: AttemptRecord) -> None:
    run.outcome = None


def diverge(run: AttemptRecord) -> None:
    run.metrics[100]["loss"] += 1.0


def eager_only(change: Edit) -> Edit:
    return lambda run: None if run.spec.graphed else change(run)


@pytest.mark.parametrize(
    ("edit", "expect", "code"),
    [
        (lambda run: None, Expectation(), 0),
        (for_graphed(diverge), Expectation(), 3),
        (for_graphed(failing(OOM)), Expectation(), 3),
        (for_graphed(failing(OOM)), Expectation("CUDA_OOM", "capture"), 0),
        (for_graphed(failing(OOM)), Expectation("CUDA_OOM"), 0),
        (for_graphed(failing(OOM)), Expectation("CUDA_OOM", "measure"), 3),
        (lambda run: None, Expectation("CUDA_OOM"), 3),
        (eager_only(failing(OOM)), Expectation(), 3),
        (for_graphed(interrupted), Expectation(), 2),
        (for_graphed(unbegun), Expectation(), 2),
        (eager_only(interrupted), Expectation(), 2),
        (lambda run: unbegun(run) if run.spec.repeat else None, Expectation(), 2),
        (for_graphed(lambda run: (diverge if run.spec.repeat else interrupted)(run)), Expectation(), 3),
    ],
)
def test_exit_codes(tmp_path: Path, edit: Edit, expect: Expectation, code: int) -> None:
    assert exit_code(compare_cells(load(write_sweep(tmp_path, edit=edit, expect=expect)))) == code


def test_too_few_steps_and_one_repeat_are_inconclusive_only(tmp_path: Path) -> None:
    def nudge(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.metrics[20]["loss"] += 1e-5

    for name, options in (("short", {"steps": 60}), ("once", {"repeats": 1})):
        results = compare_cells(load(write_sweep(tmp_path / name, edit=nudge, **options)))  # type: ignore[arg-type]
        assert results[1].verdict is not None and results[1].verdict.verdict == "INCONCLUSIVE"
        assert exit_code(results) == 4


def test_statuses_of_runs_that_never_ended(tmp_path: Path) -> None:
    interrupted_result = judged(tmp_path / "a", for_graphed(interrupted))
    assert (interrupted_result.outcome, interrupted_result.unfinished) == ("NOT ENDED", True)
    never_begun_result = judged(tmp_path / "b", for_graphed(unbegun))
    assert never_begun_result.outcome == "NOT RUN"
    said = [result.verdict.reason for result in (interrupted_result, never_begun_result) if result.verdict]
    assert [reason.partition(": ")[2] or reason for reason in said] == [
        "the graphed run has not ended", "the graphed run has not begun"
    ], "records do not tell a run that goes on from one that was interrupted"  # fmt: skip


def test_a_teardown_that_hung_keeps_its_results_but_is_unexpected(tmp_path: Path) -> None:
    result = judged(tmp_path, for_graphed(lambda run: run.end(outcome="TEARDOWN_HANG")))
    assert result.verdict is not None and (result.verdict.verdict, result.unexpected) == ("BITWISE", True)


def test_cells_that_do_not_run_are_no_failure(tmp_path: Path) -> None:
    reason = Reason("cuda.needed", "torch needs CUDA", "use a host with a GPU")
    extra = [Extra(workload_spec(0, "torch", 120), (reason,), "not_runnable")]
    results = compare_cells(load(write_sweep(tmp_path, extra=extra)))
    assert results[-1].verdict is None
    assert exit_code(results) == 0
    assert exit_code(compare_cells(load(write_sweep(tmp_path / "none", workloads=0, extra=extra)))) == 0


def test_a_graphed_cell_whose_eager_baseline_failed_is_incomparable_without_a_run(tmp_path: Path) -> None:
    def edit(record: AttemptRecord) -> None:
        record.begun = not record.spec.graphed and record.spec.repeat == 0
        record.end(outcome="ENVIRONMENT", phase="init", failure_class="IMPORT", repeats_alike=True)

    sweep = write_sweep(tmp_path, repeats=2, edit=edit)
    eager, graphed = results = compare_cells(load(sweep))
    assert not eager.unfinished and not graphed.unfinished and graphed.outcome == "SKIPPED"
    assert graphed.verdict and graphed.verdict.verdict == "INCOMPARABLE"
    assert f"not tried: no eager run to compare with, since repeat 0 of {eager.cell.cell_id} ended as ENVIRONMENT" in (
        graphed.verdict.reason
    )
    assert [*eager.skipped] == [1] and [*graphed.skipped] == [0, 1]
    assert exit_code(results) is ExitCode.FAILED
    write_report(sweep)
    assert "**SKIPPED** A1, repeats 0, 1: not tried: no eager run" in (sweep.report / "report.md").read_text()
