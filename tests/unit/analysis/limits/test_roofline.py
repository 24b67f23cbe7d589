"""Test the hardware's limit of a cell: its arithmetic, its text in the report, and when it is unknown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.limits.roofline import Roofline, cell_roofline, milliseconds
from analysis.limits.step_work import Work
from analysis.records.load import load
from analysis.report.sections.hardware_limit import _kernel_table
from analysis.report.write_report import write_report
from launch.contract.records.gpu_rates import GpuRates
from launch.contract.records.kernels import BOUNDS_US, Kernels, KernelTime
from launch.contract.spec import RunSpec
from tests.records import RATES, AttemptRecord, Edit, write_sweep
from tests.schemas import validated


def change_rates(**changes: object) -> Edit:
    """Set rates of every rank; ``rates=None`` removes the event."""

    def edit(run: AttemptRecord) -> None:
        for events in run.events.values():
            for event in [event for event in events if event["kind"] == "rates"]:
                if changes == {"rates": None}:
                    events.remove(event)
                else:
                    event["rates"].update(changes)

    return edit


def roofline(tmp_path: Path, *edits: Edit, change: Callable[[RunSpec], RunSpec] = lambda spec: spec) -> Roofline | None:
    def edit(run: AttemptRecord) -> None:
        for each in edits:
            each(run)

    records = load(write_sweep(tmp_path, device="cuda", impls=("torch",), edit=edit))
    cell = records.plan.cells[0]
    return cell_roofline(change(cell.run_spec), [run.attempt for run in records.runs[cell.cell_id] if run.attempt])


def test_each_kind_takes_the_longer_of_operations_and_bytes() -> None:
    rates = GpuRates("bf16", flops=1e12, bandwidth=1e9)
    assert milliseconds(Work(3e12, 1e9), rates) == 3000
    assert milliseconds(Work(3e12, 4e9), rates) == 4000
    found = Roofline(0, {"dense": Work(3e12, 1e9), "optimizer": Work(0, 4e9)}, rates)
    assert (found.limit_ms, found.share(14_000)) == (7000, 0.5)


def test_the_best_rates_count_and_the_longest_stage(tmp_path: Path) -> None:
    def second_repeat_is_faster(run: AttemptRecord) -> None:
        if run.spec.repeat == 1:
            change_rates(flops=2 * RATES.flops)(run)

    found = roofline(tmp_path, second_repeat_is_faster)
    assert found and found.rates == dataclasses.replace(RATES, flops=2 * RATES.flops)
    staged = replace(found, reason="")

    def in_two_stages(spec: RunSpec) -> RunSpec:
        return replace(spec, parallelism=replace(spec.parallelism, pp=2))

    last = roofline(tmp_path / "staged", change=in_two_stages)
    # The last stage computes the logits.
    assert last and last.stage == 1 and staged.stage == 0
    assert last.limit_ms and staged.limit_ms and last.limit_ms < staged.limit_ms


def test_without_rates_there_is_work_and_no_limit(tmp_path: Path) -> None:
    def missing(name: str, *edits: Edit, fp8: str = "none") -> str:
        def change(spec: RunSpec) -> RunSpec:
            return replace(spec, training=replace(spec.training, fp8=fp8))

        found = roofline(tmp_path / name, *edits, change=change)
        assert found and found.rates is None and found.limit_ms is None and found.share(1.0) is None
        assert found.work["dense"].operations > 0
        return found.reason

    assert missing("old", change_rates(rates=None)) == "no run measured the rates of its GPU"
    assert missing("damaged", change_rates(flops="fast")) == "no run measured the rates of its GPU"
    assert missing("zero", change_rates(bandwidth=0.0)) == "a rate that a run recorded is not positive"
    assert missing("fp8", fp8="current") == "the rate of products in FP8 is not measured"


def test_a_users_program_and_a_cpu_have_no_limit(tmp_path: Path) -> None:
    assert roofline(tmp_path / "command", change=lambda spec: replace(spec, engine="command")) is None

    def on_cpu(spec: RunSpec) -> RunSpec:
        return replace(spec, placement=replace(spec.placement, device="cpu"))

    assert roofline(tmp_path / "cpu", change=on_cpu) is None


# --- the report -----------------------------------------------------------------------------------------------------


def test_the_report_shows_both_limits(tmp_path: Path) -> None:
    report = write_report(write_sweep(tmp_path, device="cuda", impls=("torch",)))
    text, content = report.markdown.read_text(), validated("report", report.json.read_text())
    for cell, row in zip(content["cells"], rows(text), strict=True):
        found, step = cell["roofline"], cell["roofline"]["limit_ms"] / cell["roofline"]["of_hardware"]
        assert row[:4] == [cell["name"], f"{step:.2f} ms", f"{found['limit_ms']:.2f} ms", f"{found['of_hardware']:.0%}"]
        assert found["limit_ms"] == pytest.approx(sum(work["milliseconds"] for work in found["work"].values()))
        assert row[-1] == "50 TFLOP/s in fp32, 4.00 TB/s |"
    share = content["cells"][1]["roofline"]["of_hardware"]
    assert f"The hardware needs {share:.0%} of its step (section The hardware's limit)." in report.summary


def rows(text: str) -> list[list[str]]:
    lines = text.split("## The hardware's limit")[1].split("##")[0].splitlines()
    return [line.removeprefix("| ").split(" | ") for line in lines if line.startswith("| A")]


def test_the_report_shows_the_kernels_of_the_fastest_cell_of_each_task(tmp_path: Path) -> None:
    text = write_report(write_sweep(tmp_path, device="cuda", impls=("torch",))).markdown.read_text()
    shown = text.split("## The hardware's limit")[1].split("\n## ")[0]
    assert shown.count("the most time in a step of A1") == shown.count("| kernel |") == 1
    assert "The step has 1,200 kernels in all." in shown
    assert r"| `gemm<a\|b>` | 96 | 4.25 ms | 26% |" in shown


def test_kernels_whose_cut_names_are_equal_are_told_to_differ() -> None:
    one, other = KernelTime("cutlass", 2, 3.0), KernelTime("gemm", 1, 2.0)
    for longest, cut in (((one, other), False), ((one, other, one), True)):
        said, _ = _kernel_table(10.0, "A1", Kernels((1.0,) * (len(BOUNDS_US) + 1), 5.0, longest))
        assert ("Long names are cut" in said) == cut


def test_the_kernels_of_a_wrong_graph_are_not_shown(tmp_path: Path) -> None:
    def diverges(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.metrics[90]["loss"] += 1.0

    text = write_report(write_sweep(tmp_path, device="cuda", impls=("torch",), edit=diverges)).markdown.read_text()
    assert "**DIVERGED**" in text and "the most time in a step of A0" in text and "in a step of A1" not in text


def test_a_report_of_older_runs_says_what_is_missing(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, device="cuda", impls=("torch",), edit=change_rates(rates=None))
    report = write_report(sweep)
    text = report.markdown.read_text()
    assert "## The hardware's limit\n\nUnknown: no run measured the rates of its GPU.\n" in text
    assert "These kernels take the most time in a step of A1" in text
    assert "hardware's limit" not in report.summary
    validated("report", report.json.read_text())


def test_one_cell_without_rates_keeps_its_row(tmp_path: Path) -> None:
    def eager_only(run: AttemptRecord) -> None:
        if run.spec.graphed:
            change_rates(rates=None)(run)

    report = write_report(write_sweep(tmp_path, device="cuda", impls=("torch",), edit=eager_only))
    eager, graphed = rows(report.markdown.read_text())
    assert eager[3].endswith("%") and graphed[2:4] == ["-", "-"]
    assert graphed[-1] == "unknown: no run measured the rates of its GPU |"


def test_a_cpu_sweep_has_no_word_of_it(tmp_path: Path) -> None:
    report = write_report(write_sweep(tmp_path))
    assert "hardware's limit" not in report.markdown.read_text()
    assert all(cell["roofline"] is None for cell in json.loads(report.json.read_text())["cells"])
