"""Test the perturbed eager run: a difference no larger than that of this run is no divergence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis.records.load import load
from analysis.records.steps import Steps
from analysis.report.write_report import write_report
from analysis.sweep.cell_results import CellResult
from analysis.sweep.judge_cells import compare_cells
from analysis.sweep.judge_sweep import judge_sweep
from analysis.verdict.judge_curves import judge_curves
from launch.common.atomic_files import read_json
from launch.contract.exit_codes import ExitCode
from launch.contract.outcomes import Outcome
from launch.contract.plan import Margins, read_plan
from tests.records import AttemptRecord, Edit, write_sweep

FIRST_COMPARED = 4


def noisy(run: AttemptRecord, graphed: float, perturbed: float = 0.0) -> None:
    """Add noise to the loss of ``run``, with a standard deviation in margins."""
    scale = perturbed if run.spec.perturbed else graphed if run.spec.graphed else 0.0
    noise = np.random.default_rng(run.spec.repeat).normal(0, scale * Margins().loss, len(run.metrics))
    for step, change in list(zip(run.metrics, noise, strict=True))[FIRST_COMPARED:]:
        step["loss"] += change


def compared(root: Path, *, graphed: float, perturbed: float | None = None, fails: bool = False) -> CellResult:
    """Return the graphed cell of a sweep whose exact eager runs equal each other.

    ``graphed`` and ``perturbed`` are standard deviations of the noise in those runs' losses, in margins.
    """

    def edit(run: AttemptRecord) -> None:
        noisy(run, graphed, perturbed or 0.0)
        if fails and run.spec.perturbed:
            run.outcome = Outcome("CUDA_OOM", "measure", "bundle000", 0.0, 1.0, exit_code=1)

    sweep = write_sweep(root, perturbed=perturbed is not None, edit=edit)
    return compare_cells(load(sweep))[1]


def verdict_of(result: CellResult) -> str:
    assert result.verdict is not None
    return result.verdict.verdict


def test_a_difference_no_larger_than_that_of_the_perturbed_run_is_no_divergence(tmp_path: Path) -> None:
    """Compiled kernels round differently in every step, and eager repeats that are equal bit for bit do not show it."""
    assert verdict_of(compared(tmp_path / "without", graphed=0.5)) == "DIVERGED"
    found = compared(tmp_path / "with", graphed=0.5, perturbed=0.5)
    assert verdict_of(found) == "INCONCLUSIVE"
    assert found.verdict and "eager repeats and the perturbed run differ among themselves" in found.verdict.reason
    assert verdict_of(compared(tmp_path / "small", graphed=0.1, perturbed=0.1)) == "EQUIVALENT"


def test_a_difference_far_beyond_the_perturbed_run_is_one(tmp_path: Path) -> None:
    assert verdict_of(compared(tmp_path, graphed=30.0, perturbed=0.1)) == "DIVERGED"


@pytest.mark.parametrize("perturbed", [0.1, 50.0])
def test_a_perturbed_run_makes_nothing_pass_and_no_graphed_run_its_partner(tmp_path: Path, perturbed: float) -> None:
    alone, found = (
        compared(tmp_path / name, graphed=0.0, perturbed=p) for name, p in (("alone", None), ("found", perturbed))
    )
    assert verdict_of(alone) == verdict_of(found) == "BITWISE"
    assert len(alone.pairs) == len(found.pairs) == 2


def test_a_perturbed_run_that_failed_tells_nothing(tmp_path: Path) -> None:
    found = compared(tmp_path, graphed=0.5, perturbed=0.5, fails=True)
    assert verdict_of(found) == "INCONCLUSIVE"
    assert found.verdict and "the perturbed run ended CUDA_OOM: move its folder runs/eager-" in found.verdict.fix


def test_a_perturbed_run_of_another_machine_hides_no_fault(tmp_path: Path) -> None:
    """Such a run differs from equal eager repeats before it is perturbed. Clean step checks would excuse the later
    differences."""

    def edit(run: AttemptRecord) -> None:
        noise = np.random.default_rng(0).normal(0, 0.05, len(run.metrics))
        for step, change in list(zip(run.metrics, noise, strict=True))[2 if run.spec.perturbed else len(noise) :]:
            step["loss"] += change
        run.metrics[60]["loss"] += 0.2 * run.spec.graphed

    sweep = write_sweep(tmp_path, perturbed=True, step_checks=5, edit=edit)
    verdict = compare_cells(load(sweep))[1].verdict
    assert verdict and verdict.verdict == "INCONCLUSIVE" and "first at step 60" in verdict.reason
    assert "differs from them before it is perturbed: move its folder" in verdict.fix


def grows(run: AttemptRecord) -> None:
    """Let the difference of graphed runs double at the end, up to half a margin."""
    if run.spec.graphed:
        for step, metrics in enumerate(run.metrics[FIRST_COMPARED:], FIRST_COMPARED):
            metrics["loss"] += 0.45 * Margins().loss * 2 ** ((step - len(run.metrics)) / 2)


def nan(run: AttemptRecord) -> None:
    if run.spec.graphed:
        run.metrics[-1]["loss"] = "NaN"


def eager_repeats_differ(run: AttemptRecord) -> None:
    noisy(run, 30.0)
    if not run.spec.graphed and run.spec.repeat:
        run.metrics[-1]["loss"] += 1e-7


@pytest.mark.parametrize(
    ("change", "verdict", "needed"),
    [
        (lambda run: noisy(run, 0.5), "INCONCLUSIVE", True),
        (lambda run: noisy(run, 30.0), "INCONCLUSIVE", True),
        (grows, "INCONCLUSIVE", True),
        (lambda run: noisy(run, 0.1), "EQUIVALENT", False),
        (lambda run: noisy(run, 0.0), "BITWISE", False),
        (eager_repeats_differ, "DIVERGED", False),
        (nan, "DIVERGED", False),
    ],
    ids=["noise", "far", "growth", "passes", "equal", "eager repeats differ", "NaN"],
)
def test_a_verdict_that_rests_on_equal_eager_repeats_waits_for_the_perturbed_run(
    tmp_path: Path, change: Edit, verdict: str, needed: bool
) -> None:
    def edit(run: AttemptRecord) -> None:
        change(run)
        run.begun = not run.spec.perturbed

    sweep = write_sweep(tmp_path, perturbed=True, if_needed=True, edit=edit)
    eager, graphed = judge_sweep(sweep).results
    assert not eager.unfinished and graphed.verdict
    perturbed = eager.cell.run_ids[-1]
    assert (graphed.verdict.verdict, graphed.verdict.needed_run) == (verdict, perturbed if needed else "")
    assert (f"only the perturbed run {perturbed} shows" in graphed.verdict.reason) == needed
    assert ("orchestrator resume" in graphed.verdict.fix) == needed


def test_a_report_names_the_runs_that_its_verdicts_need(tmp_path: Path) -> None:
    def edit(run: AttemptRecord) -> None:
        noisy(run, 0.5)
        run.begun = not run.spec.perturbed

    sweep = write_sweep(tmp_path, perturbed=True, if_needed=True, edit=edit)
    report = write_report(sweep)
    (needed,) = read_plan(sweep).runs_if_needed
    assert report.exit_code == ExitCode.INCONCLUSIVE
    assert read_json(sweep.report / "summary.json")["needed_runs"] == [needed]


def test_the_report_names_the_source_of_the_noise_floor(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, perturbed=True)
    write_report(sweep)
    assert "over 2 repeats and a perturbed run" in (sweep.report / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("graphed", [1, 2])
def test_a_perturbed_run_is_no_second_eager_repeat(graphed: int) -> None:
    step = np.arange(120)
    noise = np.random.default_rng(1).normal(0, 0.1 * Margins().loss, (graphed + 2, 120))
    runs = [
        Steps(step, 5 - step / 40 + each, np.ones(120), np.ones(120), np.full(120, 8), np.full(120, "measure"))
        for each in noise
    ]
    after = {f"graphed {place}": run for place, run in enumerate(runs[2:])}
    found = judge_curves({"eager": runs[0]}, after, step, 0, Margins(), perturbed=runs[1])
    assert found.verdict == "INCONCLUSIVE" and "two complete eager repeats" in found.reason


@pytest.mark.parametrize("repeatable", [True, False])
def test_deterministic_mode_is_no_advice_if_both_sides_repeat_themselves(repeatable: bool) -> None:
    """There they would differ by the same rounding, and the verdict would be DIVERGED."""
    step = np.arange(120)
    noise = np.random.default_rng(1).normal(0, 0.5 * Margins().loss, (4, 120))
    noise[0] = 0.0
    eager, perturbed, *graphed = (
        Steps(step, 5 - step / 40 + each, np.ones(120), np.ones(120), np.full(120, 8), np.full(120, "measure"))
        for each in noise
    )
    after = {"graphed 0": graphed[0], "graphed 1": graphed[0 if repeatable else 1]}
    found = judge_curves({"eager 0": eager, "eager 1": eager}, after, step, 0, Margins(), perturbed=perturbed)
    assert found.verdict == "INCONCLUSIVE" and "the perturbed run differ" in found.reason
    assert ("deterministic mode" in found.advice) is not repeatable and "lower the learning rate" in found.advice
