"""Step checks and curves: a fault in one step is DIVERGED, and checks without one stand in for curves that noise hides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from analysis.records.load import load
from analysis.report.write_report import write_report
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import compare_cells
from launch.common.atomic_files import read_json, write_json
from launch.contract.plan import Margins, read_plan
from launch.contract.records.step_check import NOISE_MULTIPLE, RoutingDifference, StepCheck, TensorDifference
from tests.records import AttemptRecord, write_sweep

STEPS = (4, 62, 119)
ROUNDING = TensorDifference("gradient of head.weight", 1e-6, 1e-9, noise=1e-6)
FAULT = TensorDifference("gradient of layers.3.mlp.down", 1e-3, 1e-4, noise=1e-6)
Edit = Callable[[AttemptRecord], None]


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


def test_tokens_that_move_further_than_rounding_are_a_divergence(tmp_path: Path) -> None:
    moved = RoutingDifference("router of layer 1, micro-batch 0", 3, gap=0.1, noise=0.1 / NOISE_MULTIPLE / 1.01)
    result = compared(tmp_path, lambda run: check_of(run, 4, found(4, routing=(moved,))))
    assert verdict_of(result)[0] == "DIVERGED" and "sends 3 tokens to other experts" in verdict_of(result)[1]


def test_clean_checks_stand_in_for_curves_that_noise_hides(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, 2.0)
        check_of(run, 62, found(62, ROUNDING))

    without = write_sweep(tmp_path / "without", edit=lambda run: add_noise(run, 2.0))
    assert verdict_of(compare_cells(load(without))[1])[0] == "INCONCLUSIVE"
    result = compared(tmp_path / "with", edit)
    assert verdict_of(result)[0] == "EQUIVALENT (step-checked)" and result.passes
    assert result.graphs.step_checks and result.graphs.step_checks.most == 1.0
    assert {pair.verdict.verdict for pair in result.pairs} == {"EQUIVALENT (step-checked)"}


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_a_short_window_passes_by_its_checks_in_quick_mode_alone(
    tmp_path: Path, mode: Literal["full", "quick"]
) -> None:
    sweep = write_sweep(tmp_path, step_checks=3, steps=20, repeats=1, edit=lambda run: add_noise(run, 0.01))
    write_json(sweep.plan, dataclasses.replace(read_plan(sweep), margins=Margins(mode=mode)))
    verdict, reason = verdict_of(compare_cells(load(sweep))[1])
    assert verdict == {"full": "INCONCLUSIVE", "quick": "EQUIVALENT (step-checked)"}[mode]
    assert "the noise floor is unknown" in reason


def test_bits_that_are_equal_stay_bitwise(tmp_path: Path) -> None:
    assert verdict_of(compared(tmp_path, lambda run: None))[0] == "BITWISE"


def test_steps_that_agree_do_not_explain_curves_that_do_not(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, 0.1)
        for step in run.metrics[40:] if run.spec.graphed else ():
            step["loss"] += 1.0

    verdict, reason = verdict_of(compared(tmp_path, edit))
    assert verdict == "INCONCLUSIVE" and reason.startswith("the steps agree")


@pytest.mark.parametrize(
    "check",
    [
        None,
        found(62, ROUNDING, calibrated=False),
        StepCheck(62, skipped="2.0 GiB missing"),
    ],
    ids=["missing", "uncalibrated", "skipped"],
)
def test_checks_that_did_not_take_place_decide_nothing(tmp_path: Path, check: StepCheck | None) -> None:
    def edit(run: AttemptRecord) -> None:
        add_noise(run, 2.0)
        check_of(run, 62, check)

    result = compared(tmp_path, edit)
    assert verdict_of(result)[0] == "INCONCLUSIVE"
    assert result.graphs.step_checks and result.graphs.step_checks.undecided


def test_a_step_may_count_as_checked_only_where_the_plan_has_a_check(tmp_path: Path) -> None:
    """A run would choose its own steady window."""

    def edit(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.metrics[80]["phase"] = "check"

    assert verdict_of(compared(tmp_path, edit))[0] == "INCOMPARABLE"


def test_checks_cost_no_speed(tmp_path: Path) -> None:
    """Steps after a check are slow, and in no window."""

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
