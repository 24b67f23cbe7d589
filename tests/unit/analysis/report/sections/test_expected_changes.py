"""Test the tables of expected changes, the cost of captures and failure modes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.records.load import load
from analysis.report.write_report import write_report
from analysis.sweep.failure_modes import failure_modes
from analysis.sweep.judge_cells import compare_cells
from analysis.sweep.metric_changes import MemoryRisk, memory_risks, metric_changes
from analysis.verdict.verdict import Verdict
from launch.contract.outcomes import Outcome
from launch.contract.plan import Reason
from tests.records import GIB, AttemptRecord, Extra, workload_spec, write_sweep
from tests.report_text import report_text

RULE = Reason("scope.moe_router", "moe with moe_router", "drop one of the two")
TIMES = {1e-3: 15.0, 2e-3: 16.0, 3e-3: 10.0}


def eventful(run: AttemptRecord) -> None:
    """Change graphed runs: they take 15 and 16 ms instead of 20, and those of the third workload diverge."""
    rate = run.spec.training.learning_rate
    for step in run.metrics:
        step["step_time_ms"] = TIMES[rate] if run.spec.graphed else 20.0
    if run.spec.graphed and rate == 3e-3:
        run.metrics[90]["loss"] += 0.5


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


# --- expected changes -----------------------------------------------------------------------------------------------


def test_a_change_spans_the_cells_that_pass(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, workloads=3, device="cuda", impls=("torch",), edit=eventful)
    step, throughput, before, peak = metric_changes(compare_cells(load(sweep)))
    assert (step.metric, step.graphs) == ("step time", "torch")
    assert [change.label for change in step.changes] == ["torch, lr 0.001", "torch, lr 0.002"]
    assert step.span == pytest.approx((-0.25, -0.2))
    assert throughput.span == pytest.approx((0.25, 1 / 3))
    assert before.span == (0.0, 0.0)
    assert peak.changes[0].graphed - peak.changes[0].eager == pytest.approx(0.4 * GIB, rel=1e-6)


def test_a_capture_in_the_first_step_has_no_memory_to_compare_before_it(tmp_path: Path) -> None:
    eager, graphed = compare_cells(load(write_sweep(tmp_path, device="cuda", impls=("torch",), edit=eventful)))
    assert graphed.memory is not None
    phases = tuple(peak for peak in graphed.memory.phases if peak.phase != "warmup")
    metrics = [
        change.metric
        for change in metric_changes([eager, replace(graphed, memory=replace(graphed.memory, phases=phases))])
    ]
    assert "memory before capture" not in metrics and "peak memory" in metrics


def test_a_speed_that_is_not_sure_is_no_change_to_expect(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, device="cuda", impls=("torch",), edit=eventful, repeats=1)
    step = metric_changes(compare_cells(load(sweep)))[0]
    assert step.span is None
    row = "| step time | unknown, since losses or the speed-up are INCONCLUSIVE | `torch` | A1 |"
    assert row in section(report_text(sweep), "Expected metric changes")


def test_a_speed_of_a_cell_with_undecided_losses_is_no_change_to_expect(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, device="cuda", impls=("torch",), edit=eventful)
    eager, graphed = compare_cells(load(sweep))
    step, _, _, peak = metric_changes([eager, replace(graphed, verdict=Verdict("INCONCLUSIVE", "noisy"))])
    assert metric_changes([eager, graphed])[0].span and step.span is None and peak.span


def out_of_memory(run: AttemptRecord) -> None:
    rate = run.spec.training.learning_rate
    if rate == 1e-3 or (run.spec.graphed and rate == 2e-3):
        run.outcome = Outcome("CUDA_OOM", "capture" if run.spec.graphed else "measure", "b", 0.0, 1.0, 0, "OOM_CAPTURE")


def test_the_risk_is_among_cells_whose_twin_fits(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, workloads=3, device="cuda", impls=("torch",), edit=out_of_memory)
    assert memory_risks(compare_cells(load(sweep))) == (MemoryRisk("torch", 2, ("torch, lr 0.002",)),)
    assert "| out of memory | in 1 of 2 cells whose eager baseline fits | `torch` | B1 |" in report_text(sweep)


# --- captures -------------------------------------------------------------------------------------------------------


def test_the_speed_of_a_cell_stands_beside_what_its_capture_took(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, workloads=2, device="cuda", impls=("torch",), ranks=2, edit=eventful)
    text = section(report_text(sweep), "Speed")
    row = next(line for line in text.splitlines() if line.startswith("| A1 |")).strip("| ").split(" | ")
    assert row[4] == "4 graphs per rank in 2.50 s"
    assert row[6:] == ["20.00 / 15.00 ms", "no / no", "51,200 / 68,267", "0.05033 / 0.06711"]


def test_a_cpu_compiles_functions_and_captures_no_graph(tmp_path: Path) -> None:
    text = section(report_text(write_sweep(tmp_path, workloads=2, edit=eventful)), "Speed")
    assert "| 4 compiled functions per rank |" in text


def test_equality_over_few_steps_says_of_how_many(tmp_path: Path) -> None:
    for steps, said in ((60, "BITWISE over 56 steps only"), (120, "BITWISE")):
        text = report_text(write_sweep(tmp_path / str(steps), steps=steps))
        assert f"| {said} |" in text
    several = report_text(write_sweep(tmp_path / "several", steps=60, workloads=2))
    assert "| cell | verdict over 56 steps only |" in several and "| A1 | BITWISE |" in several


def test_a_cpu_has_relative_changes_alone(tmp_path: Path) -> None:
    report = write_report(write_sweep(tmp_path, workloads=2, edit=eventful))
    text = report.markdown.read_text()
    for title in ("Expected metric changes", "Speed"):
        assert " ms" not in section(text, title) and "TFLOP/s" not in section(text, title)
    assert "| step time | 20% to 25% down | `torch_compile` | A1, B1 |" in text
    for change in json.loads(report.json.read_text())["metric_changes"]:
        for cell in change["cells"]:
            assert (cell["eager"] is None) == (change["metric"] in ("step time", "model TFLOP/s/GPU"))


# --- failure modes --------------------------------------------------------------------------------------------------


def failing(run: AttemptRecord) -> None:
    """Let both sides of the first workload run out of memory, and let graphed runs of the others fail to capture."""
    rate = run.spec.training.learning_rate
    if rate == 1e-3:
        run.outcome = Outcome("CUDA_OOM", "warmup", "b", 0.0, 1.0, 0, "CUDA_OOM", "out of memory", "less")
    elif run.spec.graphed:
        run.outcome = Outcome("CAPTURE_FAILED", "capture", "b", 0.0, 1.0, 0, "SYNC_IN_CAPTURE", ".item()", "remove it")


def test_failures_are_told_by_kind_with_whether_eager_has_them_too(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, workloads=4, edit=failing)
    capture, memory = failure_modes(compare_cells(load(sweep)))
    assert (capture.name, capture.ending, len(capture.graphed), capture.eager) == (
        "SYNC_IN_CAPTURE", "CAPTURE_FAILED in capture", 3, (),
    )  # fmt: skip
    assert (memory.ending, len(memory.graphed), len(memory.eager)) == ("CUDA_OOM in warmup", 1, 1)
    both, graphed = section(report_text(sweep), "Failures").strip().splitlines()
    assert (
        "- **CUDA_OOM** in phase warmup, class CUDA_OOM; A0, repeats 0, 1, attempt 1, rank 0; A1, repeats 0, 1, "
        in both
    )
    assert both.endswith("out of memory. Fix: less. Eager runs fail in the same way: graphs are not the cause.")
    assert "; B1, repeats 0, 1, attempt 1, rank 0; C1, " in graphed and "; D1, " in graphed
    assert graphed.endswith(": .item(). Fix: remove it. No eager run fails in this way.")


def test_failures_whose_messages_differ_in_numbers_are_told_once(tmp_path: Path) -> None:
    def fail(run: AttemptRecord) -> None:
        if run.spec.graphed:
            message = f"tried to allocate {run.spec.repeat + 2} MiB at 0x{run.spec.repeat}f"
            failure = "OOM" if run.spec.training.learning_rate == 1e-3 else "other"
            run.outcome = Outcome(
                "CUDA_OOM", "capture", "b", 0.0, 1.0, 0, "OOM_CAPTURE", f"{failure}: {message}", "less"
            )

    text = section(report_text(write_sweep(tmp_path, workloads=2, edit=fail)), "Failures").strip()
    assert [line.partition(": ")[2].partition(" at ")[0] for line in text.splitlines()] == [
        "OOM: tried to allocate 2 MiB", "other: tried to allocate 2 MiB",
    ]  # fmt: skip


def test_a_reason_of_several_cells_is_told_once(tmp_path: Path) -> None:
    extra = [Extra(workload_spec(number, "local", 120), (RULE,)) for number in range(4)]
    text = section(report_text(write_sweep(tmp_path, extra=extra)), "Cells that no host can run")
    assert "; and 1 more | scope.moe_router | moe with moe_router | drop one of the two | - |" in text
    assert text.count(RULE.rule) == 1


def test_a_clean_sweep_has_no_failures(tmp_path: Path) -> None:
    assert "## Failures" not in report_text(write_sweep(tmp_path))
