"""Test step checks and curves: a fault in one step is DIVERGED, and checks without faults replace curves that noise
hides."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from analysis.records.load import load
from analysis.report.headline import headline
from analysis.report.write_report import write_report
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import compare_cells
from launch.common.atomic_files import read_json, write_json
from launch.contract.outcomes import Outcome
from launch.contract.paths import SweepPaths
from launch.contract.plan import Margins, read_plan
from launch.contract.records.step_check import (
    BROKEN_CAPACITY,
    NOISE_MULTIPLE,
    RoutingDifference,
    StepCheck,
    TensorDifference,
)
from tests.records import AttemptRecord, Edit, write_attempt, write_sweep

STEPS = (4, 62, 119)
ROUNDING = TensorDifference("gradient of head.weight", 1e-6, noise=1e-6)
FAULT = TensorDifference("gradient of layers.3.mlp.down", 1e-3, noise=1e-6)


def add_noise(run: AttemptRecord, margins: float) -> None:
    """Add noise to the losses after the capture, with a standard deviation of ``margins``."""
    seed = [run.spec.repeat, run.spec.graphed]
    noise = np.random.default_rng(seed).normal(0, margins * Margins().loss, len(run.metrics))
    for step, change in list(zip(run.metrics, noise, strict=True))[4:]:
        step["loss"] += change


def find(run: AttemptRecord, step: int, check: StepCheck | None, rank: int = 0) -> None:
    """Replace what the check of ``step`` found on ``rank``; None removes it."""
    events = [e for e in run.events[rank] if not (e["kind"] == "step_check" and e["step"] == step)]
    if check:
        event = next(e for e in run.events[rank] if e["kind"] == "step_check" and e["step"] == step)
        events.append({**event, "check": dataclasses.asdict(check)})
    run.events[rank] = events


def found(step: int, *differences: TensorDifference, **content: Any) -> StepCheck:
    return StepCheck(step, 40, len(differences), differences, **content)


def compared(root: Path, edit: Edit, **settings: Any) -> CellResult:
    return compare_cells(load(write_sweep(root, step_checks=3, edit=edit, **settings)))[1]


def check_of(run: AttemptRecord, *arguments: Any, **named: Any) -> None:
    if run.spec.graphed and run.spec.repeat == 1:
        find(run, *arguments, **named)


def verdict_of(result: CellResult) -> tuple[str, str]:
    assert result.verdict
    return result.verdict.verdict, result.verdict.reason


@pytest.mark.parametrize("noise", [0.0, 0.1, 2.0], ids="noise {}".format)
def test_a_fault_in_one_step_of_one_rank_is_a_divergence_whatever_the_curves_say(tmp_path: Path, noise: float) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, noise)
        check_of(run, 62, found(62, FAULT), rank=1)

    verdict, reason = verdict_of(compared(tmp_path, edit, ranks=2))
    assert verdict == "DIVERGED"
    assert "gradient of layers.3.mlp.down" in reason and "step 62, rank 1, repeat 1" in reason


def test_a_difference_without_any_noise_is_a_fault(tmp_path: Path) -> None:
    exact = TensorDifference("gradient of head.weight", 1e-6, noise=0.0)
    verdict, reason = verdict_of(compared(tmp_path, lambda run: check_of(run, 62, found(62, exact))))
    assert verdict == "DIVERGED" and "rounding explains only 0" in reason


def test_tokens_that_move_further_than_rounding_are_a_divergence(tmp_path: Path) -> None:
    moved = RoutingDifference("router of layer 1, micro-batch 0", 3, gap=0.1, noise=0.1 / NOISE_MULTIPLE / 1.01)
    result = compared(tmp_path, lambda run: check_of(run, 4, found(4, routing=(moved,))))
    assert verdict_of(result)[0] == "DIVERGED" and "sends 3 tokens to different experts" in verdict_of(result)[1]


def test_an_expert_that_keeps_too_many_tokens_is_a_divergence(tmp_path: Path) -> None:
    kept = RoutingDifference("router of layer 1, micro-batch 0", 3, gap=BROKEN_CAPACITY, noise=0.01)
    result = compared(tmp_path, lambda run: check_of(run, 4, found(4, routing=(kept,))))
    assert verdict_of(result)[0] == "DIVERGED" and "keeps more tokens than its capacity" in verdict_of(result)[1]


def test_clean_checks_stand_in_for_curves_that_noise_hides(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, 2.0)
        check_of(run, 62, found(62, ROUNDING))

    without = write_sweep(tmp_path / "without", edit=lambda run: add_noise(run, 2.0))
    assert verdict_of(compare_cells(load(without))[1])[0] == "INCONCLUSIVE"
    result = compared(tmp_path / "with", edit)
    assert verdict_of(result)[0] == "EQUIVALENT (step-checked)" and result.passes
    assert "checked steps (noise hides the curves)" in headline([result])
    assert result.graphs.step_checks and result.graphs.step_checks.most == 1.0
    assert {pair.verdict.verdict for pair in result.pairs} == {"EQUIVALENT (step-checked)"}


def test_a_pass_says_that_checks_compared_the_optimizer_in_shares(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, 2.0)
        check_of(run, 62, found(62, left_out=3))

    verdict, reason = verdict_of(compared(tmp_path, edit))
    assert verdict == "EQUIVALENT (step-checked)" and "the captured optimizer in shares, one in each step" in reason


def test_a_graphed_run_that_is_often_beyond_a_margin_that_noise_never_leaves_does_not_pass(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, 0.2)
        for step in run.metrics[4:]:
            alternating = 1 if step["step"] % 2 else -1
            step["loss"] += 1.3 * Margins().loss * alternating * (run.spec.graphed and run.spec.repeat == 0)

    verdict, reason = verdict_of(compared(tmp_path, edit, repeats=3))
    assert verdict == "INCONCLUSIVE" and "but that of eager runs at none" in reason


@pytest.mark.parametrize(("fault", "verdict"), [(0.1, "INCONCLUSIVE"), (0.0, "EQUIVALENT (step-checked)")])
def test_repeats_of_other_machines_excuse_no_fault(tmp_path: Path, fault: float, verdict: str) -> None:
    """Eager repeats of two machines differ from step 2 on. Graphed runs hardly differ from eager runs of their own
    machine."""

    def edit(run: AttemptRecord) -> None:
        noise = np.random.default_rng(0).normal(0, 1, len(run.metrics))
        of_run = 0.05 * run.spec.repeat + 1e-9 * (run.spec.graphed and fault > 0)
        for step, change in list(zip(run.metrics, noise, strict=True))[2:]:
            step["loss"] += of_run * change
        run.metrics[60]["loss"] += fault * (run.spec.graphed and run.spec.repeat == 0)

    found, reason = verdict_of(compared(tmp_path, edit))
    assert found == verdict and ("their distance is not the noise of a pair" in reason) == (fault > 0)


@pytest.mark.parametrize("phase", ["warmup", "capture", "probe"])
def test_a_check_where_nothing_is_replayed_stands_in_for_nothing(tmp_path: Path, phase: str) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, 2.0)
        for event in run.events[0]:
            event["phase"] = phase if event["kind"] == "step_check" and event["step"] == 62 else event["phase"]

    verdict, reason = verdict_of(compared(tmp_path, edit))
    assert verdict == "INCOMPARABLE" and f"a check of step 62 was recorded in phase {phase}" in reason


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_a_short_window_passes_by_its_checks_in_quick_mode_alone(
    tmp_path: Path, mode: Literal["full", "quick"]
) -> None:
    sweep = write_sweep(tmp_path, step_checks=3, steps=20, repeats=1, edit=lambda run: add_noise(run, 0.01))
    write_json(sweep.plan, dataclasses.replace(read_plan(sweep), margins=Margins(mode=mode)))
    results = compare_cells(load(sweep))
    verdict, reason = verdict_of(results[1])
    assert verdict == {"full": "INCONCLUSIVE", "quick": "EQUIVALENT (step-checked)"}[mode]
    assert "the noise floor is unknown" in reason and ("a slow drift would not show" in reason) == (mode == "quick")
    assert ("checked steps (16 steps are too few to compare curves)" in headline(results)) == (mode == "quick")


def test_bits_that_are_equal_stay_bitwise(tmp_path: Path) -> None:
    assert verdict_of(compared(tmp_path, lambda run: None))[0] == "BITWISE"


def test_steps_that_agree_do_not_explain_curves_that_do_not(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, 0.1)
        for step in run.metrics[40:] if run.spec.graphed else ():
            step["loss"] += 1.0

    verdict, reason = verdict_of(compared(tmp_path, edit))
    assert verdict == "INCONCLUSIVE" and reason.startswith("the checked steps agree")


@pytest.mark.parametrize(
    "check",
    [
        found(62, ROUNDING, calibrated=False),
        StepCheck(62, missing=3 * 2**29),
        found(62, dataclasses.replace(ROUNDING, difference=1.0, noise=0.2)),
        found(62, ROUNDING, noise=0.2),
        found(62, routing=(RoutingDifference("router of layer 1, micro-batch 0", 3, gap=0.9, noise=0.2),)),
    ],
    ids=["uncalibrated", "without memory", "blind", "blind beyond the recorded rows", "blind to routing"],
)
def test_checks_that_did_not_take_place_decide_nothing(tmp_path: Path, check: StepCheck) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, 2.0)
        check_of(run, 62, check)

    result = compared(tmp_path, edit)
    assert verdict_of(result)[0] == "INCONCLUSIVE"
    assert result.graphs.step_checks and result.graphs.step_checks.undecided
    assert (result.graphs.step_checks.most is None) == (not check.calibrated)
    if check.missing:
        expected = "not step-checked: the check of step 62 needs 1.5 GiB more of GPU memory"
        assert (result.graphs.step_checks.undecided, result.graphs.step_checks.tensors) == (expected, 40)


def test_a_lost_check_does_not_turn_its_fault_into_a_pass(tmp_path: Path) -> None:
    for name, check, verdict in (("found", found(62, FAULT), "DIVERGED"), ("lost", None, "INCOMPARABLE")):
        result = compared(tmp_path / name, lambda run, check=check: check_of(run, 62, check))
        assert verdict_of(result)[0] == verdict
    assert "graphed run: events of rank 0 have no check of every planned step" in verdict_of(result)[1]


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": 0},
        {"missing": 1},
        {"unequal": 41},
        {"unequal": 3},
        {"differences": [dataclasses.asdict(FAULT)]},
        {"step": 61},
    ],
    ids=str,
)
def test_a_check_that_contradicts_itself_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    def edit(run: AttemptRecord) -> None:
        for event in run.events[0]:
            if event["kind"] == "step_check" and event["step"] == 62:
                event["check"] |= change

    assert verdict_of(compared(tmp_path, edit))[0] == "INCOMPARABLE"


def test_an_eager_run_has_no_step_check(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        if not run.spec.graphed:
            run.events[0].append({**run.events[0][-1], "kind": "step_check", "step": 62, "check": vars(found(62))})

    assert verdict_of(compared(tmp_path, edit))[0] == "INCOMPARABLE"


def test_a_difference_without_a_scale_does_not_pass_in_quick_mode(tmp_path: Path) -> None:
    """A gradient norm of 0 in eager runs makes the noise floor of the perturbed run infinite."""

    def edit(run: AttemptRecord) -> None:
        run.metrics[10]["grad_norm"] = 0.1 if run.spec.graphed or run.spec.perturbed else 0.0

    sweep = write_sweep(tmp_path, step_checks=3, steps=20, perturbed=True, edit=edit)
    write_json(sweep.plan, dataclasses.replace(read_plan(sweep), margins=Margins(mode="quick")))
    assert verdict_of(compare_cells(load(sweep))[1])[0] != "EQUIVALENT (step-checked)"


def shift(run: AttemptRecord, margins: float, steps: slice) -> None:
    for step in run.metrics[steps] if run.spec.graphed else ():
        step["loss"] += margins * Margins().loss


def climb(run: AttemptRecord, margins: float) -> None:
    for place in range(4, len(run.metrics)):
        shift(run, margins * place / 120, slice(place, place + 1))


def learn_nothing(run: AttemptRecord) -> None:
    run.events[0] = [event for event in run.events[0] if event["kind"] != "parameters"]
    for step in run.metrics:
        step["loss"] = 3.0


def zero_norms(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["grad_norm"] = 0.0


@pytest.mark.parametrize(
    ("cause", "edit", "settings"),
    [
        ("only 56 steps are compared, and tests need 100", lambda run: None, {"steps": 60}),
        ("by more than 3 times the noise floor", lambda run: shift(run, 40, slice(50, 51)), {}),
        ("the mean difference of the loss", lambda run: shift(run, 4, slice(4, None)), {}),
        ("the loss drifts", lambda run: (climb(run, 5), shift(run, -2.5, slice(4, None))), {"repeats": 3}),
        ("the eager loss falls by", learn_nothing, {}),
        ("the eager gradient norm is 0", zero_norms, {}),
        ("margin is 0", lambda run: None, {"deterministic": True}),
    ],
    ids=["short", "bad step", "bias", "drift", "nothing learnt", "no gradient", "deterministic"],
)
def test_checks_do_not_stand_in_for_what_noise_does_not_explain(
    tmp_path: Path, cause: str, edit: Edit, settings: dict[str, Any]
) -> None:
    def noisy(run: AttemptRecord) -> None:
        edit(run)
        add_noise(run, 2.0)

    result = compared(tmp_path, noisy, **settings)
    verdict, reason = verdict_of(result)
    assert verdict == "INCONCLUSIVE" and cause in reason
    assert result.verdict and "judge single steps despite" not in result.verdict.advice, "they are checked already"


def test_checks_of_one_version_do_not_stand_in_for_another_cause_in_another(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, 2.0 if run.spec.repeat < 2 else 0.01)
        if run.spec.repeat >= 2:
            climb(run, 0.9)
            run.environment["digests"] = {**run.environment["digests"], "code": "c0de000002"}

    verdict, reason = verdict_of(compared(tmp_path, edit, repeats=4))
    assert verdict == "INCONCLUSIVE" and reason.startswith("the loss drifts")


@pytest.mark.parametrize("noise", [0.0, 2.0], ids="noise {}".format)
@pytest.mark.parametrize("outcome", ["COMPLETED", "PREEMPTED", "CAPTURE_FAILED"])
def test_another_attempt_with_a_fault_prevents_a_pass(tmp_path: Path, noise: float, outcome: str) -> None:
    """A success hides neither a fault in a step check nor a failure, whatever the noise."""

    def edit(run: AttemptRecord) -> None:
        add_noise(run, noise)
        if run.spec.graphed and run.spec.repeat == 0:
            steps = [{**step, "step_time_ms": step["step_time_ms"] * 1.01} for step in run.metrics]
            first = dataclasses.replace(run, metrics=steps, events={0: list(run.events[0])})
            if outcome != "COMPLETED":
                del first.metrics[3 if outcome == "CAPTURE_FAILED" else 90 :]
                first.outcome = Outcome(outcome, "measure", "bundle000", 0.0, 1.0)
            if outcome != "CAPTURE_FAILED":
                find(first, 62, found(62, FAULT))
            write_attempt(SweepPaths(tmp_path), first)
            run.number = 2

    verdict, reason = verdict_of(compared(tmp_path, edit))
    assert verdict == "INCONCLUSIVE" and f"attempt 1 ended {outcome}" in reason
    assert ("layers.3.mlp.down" in reason) == (outcome != "CAPTURE_FAILED")


def test_a_step_may_count_as_checked_only_where_the_plan_has_a_check(tmp_path: Path) -> None:
    """Otherwise a run would choose its own steady window."""

    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.metrics[80]["phase"] = "check"

    assert verdict_of(compared(tmp_path, edit))[0] == "INCOMPARABLE"


def test_checks_cost_no_speed(tmp_path: Path) -> None:
    """Steps after a check are slow, and no window contains them."""

    def edit(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] *= 5 if step["phase"] == "check" else 1

    def ratio(root: Path, **settings: Any) -> float:
        result = compare_cells(load(write_sweep(root, edit=edit, **settings)))[1]
        return result.speed.speedup.ratio if result.speed.speedup and result.speed.speedup.ratio else 0.0

    assert ratio(tmp_path / "with", step_checks=3) == pytest.approx(ratio(tmp_path / "without"), rel=0.01)


def test_a_report_shows_what_was_checked(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, step_checks=3, edit=lambda run: check_of(run, 119, found(119, FAULT)))
    write_report(sweep)
    cell = read_json(tmp_path / "report/report.json")["cells"][1]
    assert cell["step_checks"]["steps"] == list(STEPS) and "layers.3.mlp.down" in cell["step_checks"]["fault"]
    report = (tmp_path / "report/report.md").read_text()
    assert "## Step checks" in report and "4, 62, 119" in report


def test_no_verdict_advises_a_setting_that_the_plan_says_is_refused(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, edit=lambda run: add_noise(run, 2.0))
    for refused in ([], ["training.deterministic=true"]):
        plan = read_json(sweep.plan)
        for cell in plan["cells"]:
            cell["refused_settings"] = refused
        write_json(sweep.plan, plan)
        result = compare_cells(load(sweep))[1]
        assert result.verdict and "judge single steps despite" in result.verdict.advice
        for verdict in (result.verdict, *(pair.verdict for pair in result.pairs)):
            assert ("use deterministic mode" in verdict.advice) is (not refused)
