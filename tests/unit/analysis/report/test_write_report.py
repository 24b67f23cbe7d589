"""Test the report: equal records give equal bytes, its parts have a fixed order, and it makes no false claim."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.report.write_report import write_report
from launch.common.atomic_files import read_json, write_json
from launch.contract.outcomes import Expectation, Outcome
from launch.contract.paths import SweepPaths
from launch.contract.plan import Reason, read_plan
from launch.contract.spec import Device
from tests.records import AttemptRecord, Edit, Extra, workload_spec, write_attempt, write_sweep
from tests.report_text import report_text

RULE = Reason("scope.moe_router", "moe with moe_router", "drop one of the two", "Megatron-Core 0.16")
HOST = Reason("cuda.needed", "torch captures CUDA graphs", "use a host with a GPU")


def eventful(run: AttemptRecord) -> None:
    """Let one graphed repeat of the second workload diverge, and the graphed cell of the third run out of memory."""
    if not run.spec.graphed:
        return
    if run.spec.training.learning_rate == 2e-3 and run.spec.repeat == 1:
        run.metrics[90]["loss"] += 0.5
    if run.spec.training.learning_rate == 3e-3:
        run.outcome = Outcome(
            "CUDA_OOM", "capture", "bundle002", 0.0, 1.0, rank=0, failure_class="cuda_oom",
            message="out of memory\ntried to allocate | 2 GiB", remedy="capture less",
        )  # fmt: skip
        del run.metrics[3:]


def eventful_sweep(root: Path, device: Device = "cpu") -> SweepPaths:
    extra = [
        Extra(workload_spec(0, "local", 120), (RULE,)),
        Extra(workload_spec(0, "torch", 120), (HOST,), "not_runnable"),
    ]
    return write_sweep(root, workloads=3, device=device, extra=extra, edit=eventful)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.usefixtures("drawn")
def test_the_same_records_give_the_same_bytes_wherever_they_stand(tmp_path: Path) -> None:
    sweep = eventful_sweep(tmp_path / "here")
    write_report(sweep)
    first = files_of(sweep.report)
    moved = SweepPaths(tmp_path / "elsewhere" / "deeper")
    shutil.copytree(sweep.root, moved.root, ignore=shutil.ignore_patterns("report"))
    program = (
        "import sys, pathlib; from analysis.report.write_report import write_report; from launch.contract.paths import SweepPaths;"
        "write_report(SweepPaths(pathlib.Path(sys.argv[1])))"
    )
    subprocess.run([sys.executable, "-c", program, str(moved.root)], check=True, cwd=Path(__file__).parents[4])
    assert files_of(moved.report) == first
    assert len([name for name in first if name.endswith(".png")]) == 11, (
        "no curves of the first workload, whose pairs are bitwise"
    )
    assert all(str(tmp_path).encode() not in content for content in first.values())


def test_a_report_shortens_private_paths_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = eventful_sweep(tmp_path / "sweep")
    monkeypatch.chdir(tmp_path)
    plan = read_json(sweep.plan)
    write_json(sweep.plan, {**plan, "recipe": f"command: {{workdir: {tmp_path}/Megatron-LM}}\n"})
    write_report(sweep)
    content = json.loads((sweep.report / "report.json").read_text())
    assert content["recipe"] == "command: {workdir: ./Megatron-LM}\n" and str(tmp_path) not in report_text(sweep)


def test_parts_stand_in_order_with_the_worst_news_first(tmp_path: Path) -> None:
    report = write_report(eventful_sweep(tmp_path))
    assert report.exit_code == 3
    text = report.markdown.read_text()
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert headings == [
        "Cells", "Plots", "Ranking", "Speed", "Memory", "Expected metric changes",
        "Cells that this host or cluster cannot run", "Cells that no host can run", "Failures", "Evidence", "What this cost", "Provenance",
    ]  # fmt: skip
    assert (
        text.index("DIVERGED")
        < text.index("INCOMPARABLE")
        < text.index("did not end as expected")
        < text.index("Not run:")
    )
    assert "(ended CUDA_OOM, expected COMPLETED: out of memory tried to allocate" in text, "a failed run's message"
    assert report.summary.startswith(text.splitlines()[2])
    assert "`torch_compile, lr 0.001` (A1) is 1.25x faster (" in report.summary


def test_tables_keep_their_columns_whatever_a_message_holds(tmp_path: Path) -> None:
    text = report_text(eventful_sweep(tmp_path))
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("| ")]
    assert len(tables) == 11
    for lines in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_a_report_says_what_it_cost(tmp_path: Path) -> None:
    text = report_text(write_sweep(tmp_path, ranks=2, device="cuda"))
    cost = text.split("## What this cost")[1].split("\n## ")[0]
    assert "The attempts that count took 0.133 GPU hours: 0.0667 eager, 0.0667 graphed." in cost, (
        "four runs of 60 s on two GPUs"
    )


def test_a_cost_counts_other_attempts(tmp_path: Path) -> None:
    """The last run, which is graphed, was preempted after 30 s and began again 10 s later."""
    sweep = SweepPaths(tmp_path)

    def again(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.repeat == 0:
            assert run.outcome is not None
            began = run.outcome.started
            run.end(outcome="PREEMPTED", ended=began + 30)
            write_attempt(sweep, run)
            run.number = 2
            run.end(outcome="COMPLETED", started=began + 40, ended=began + 100)

    cost = report_text(write_sweep(tmp_path, repeats=1, device="cuda", edit=again)).split("## What this cost")[1]
    assert "The attempts that count took 0.0333 GPU hours" in cost and "Other attempts took 0.00833 GPU hours." in cost


def test_reasons_and_failures_are_said_with_their_way_out(tmp_path: Path) -> None:
    text = report_text(eventful_sweep(tmp_path))
    for said in (
        "| scope.moe_router | moe with moe_router | drop one of the two | Megatron-Core 0.16 |",
        "| cuda.needed | torch captures CUDA graphs | use a host with a GPU | - |",
        "**CUDA_OOM** in phase capture, class cuda_oom; ",
        "Fix: capture less",
        "first at step 90: the loss is",
        "compiled without CUDA graphs (CPU)",
    ):
        assert said in text


@pytest.mark.usefixtures("drawn")
def test_absolute_times_are_for_gpus_only(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        report = write_report(write_sweep(tmp_path / device, device=device))
        text, content = report.markdown.read_text(), json.loads(report.json.read_text())
        on_gpu = device == "cuda"
        assert ("tokens/s" in text) == on_gpu
        assert (" ms," in text) == on_gpu
        assert (re.search(r"^\| A1 \| .* \| 20\.\d* to 16\.\d* \| ", text, re.MULTILINE) is not None) == on_gpu
        assert ("eager_ms" in content["cells"][1]["speed"]) == on_gpu
        assert ("nothing about CUDA graphs" in report.summary) != on_gpu


def test_json_holds_the_verdicts_and_no_bare_nan(tmp_path: Path) -> None:
    def nan(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.metrics[90]["loss"] = float("nan")

    report = write_report(write_sweep(tmp_path, edit=nan))

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} in report.json")

    content = json.loads(report.json.read_text(), parse_constant=refuse)
    assert content["exit_code"] == 3
    assert content["summary"]["verdicts"] == {"DIVERGED": 1}
    verdict = content["cells"][1]["verdict"]
    assert verdict["deviation"] == {"step": 90, "metric": "loss", "size": "Infinity"}
    assert verdict["evidence"]["max_loss_difference"] == "Infinity"


def test_what_a_run_says_of_itself_stands_by_its_divergence(tmp_path: Path) -> None:
    def remarks(run: AttemptRecord) -> None:
        run.events[0].append(
            {"kind": "note", "time": 0.0, "message": f"known of {run.spec.cuda_graph.impl}. Repair it."}
        )

    def diverges(run: AttemptRecord) -> None:
        remarks(run)
        if run.spec.graphed:
            run.metrics[90]["loss"] += 1.0

    for edit, is_said in ((remarks, False), (diverges, True)):
        text = report_text(write_sweep(tmp_path / edit.__name__, edit=edit))
        assert ("The run noted: known of torch_compile. Repair it.\n" in text) == is_said
        assert "noted: known of none" not in text


def test_a_known_fault_is_named_with_its_fix_and_by_a_divergence(tmp_path: Path) -> None:
    def diverges(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.metrics[90]["loss"] += 1.0

    sweep = write_sweep(tmp_path, edit=diverges)
    plan = read_plan(sweep)
    fault = Reason("megatron.local_inputs", "its gradient is wrong", "Set cuda_graph.mend=[local_inputs].")
    cells = tuple(replace(cell, known_faults=(fault,)) if cell.graphed else cell for cell in plan.cells)
    write_json(sweep.plan, replace(plan, cells=cells))
    report = write_report(sweep)
    text = report.markdown.read_text()
    assert "Known fault: megatron.local_inputs (below)." in text
    assert (
        "### Known faults\n\n- A1: [megatron.local_inputs] its gradient is wrong. Set cuda_graph.mend=[local_inputs].\n"
    ) in text
    eager, graphed = read_json(sweep.report / "report.json")["cells"]
    assert eager["known_faults"] == [] and graphed["known_faults"][0]["fix"] == fault.remedy


def test_a_repaired_cell_says_what_its_fault_does_to_the_own_job(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    plan = read_json(sweep.plan)
    plan["cells"][1]["spec"]["cuda_graph"]["mend"] = ["local_inputs"]
    write_json(sweep.plan, plan)
    cell = read_plan(sweep).cells[1]
    sweep.plan.write_text(sweep.plan.read_text().replace(cell.cell_id, cell.run_spec.cell_id))
    assert "- A1: cuda_graph.mend=[local_inputs] repairs a known fault. Your own job keeps it" in report_text(sweep)


def test_cells_that_were_not_picked_are_spoken_of(tmp_path: Path) -> None:
    """The resolved recipe has these cells, but the summary counts without them."""
    sweep = write_sweep(tmp_path)
    said = "The sweep ran only cells with training.compile=none and cuda_graph.impl=torch or local (--only)"
    assert said not in report_text(sweep)
    only = ["training.compile=none", "cuda_graph.impl=torch", "cuda_graph.impl=local"]
    write_json(sweep.plan, read_json(sweep.plan) | {"only": only})
    assert said in report_text(sweep)


def test_repeats_of_unlike_machines_are_told_pair_by_pair(tmp_path: Path) -> None:
    """No machine has the mean of these repeats, and their losses come from other code. Repeats 0 and 1 are judged apart
    from repeat 2."""

    def newer(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = (12.0 + 2.0 * run.spec.repeat) * (1.0 if run.spec.graphed else 1.25)
            step["loss"] += (0.1 if run.spec.repeat == 2 else 0.0) + 1e-6 * (
                run.spec.cuda_graph.impl == "torch_compile"
            )
        if run.spec.repeat == 2:
            run.environment["digests"]["code"] = "newer"

    text = write_report(
        write_sweep(tmp_path / "unlike", device="cuda", impls=("torch", "torch_compile"), repeats=3, edit=newer)
    ).markdown
    said = next(
        line for line in text.read_text().splitlines() if line.startswith("**Repeats differ in machine or software")
    )
    assert "digests.code: " in said and " or newer. " in said
    assert "Pair by pair: A1 1.25x, 1.25x, 1.25x (graphed 12.00, 14.00, 16.00 ms); " in said
    assert "The plots leave out repeat 2, because its code" in text.read_text()
    page = (text.parent / "report.html").read_text()
    _, loss, *_ = (json.loads(data) for data in re.findall(r'<script type="application/json">(.*?)</script>', page))
    assert [line["repeat"] for line in loss["curves"]] == [0, 1] * 3, (
        "of two versions in one picture, one would look wrong"
    )
    assert set(loss["noise_floor"]["y"]) == {0}
    assert "over 2 of 3 repeats" in text.read_text() and "| 2 / 2 of 3 each |" in text.read_text()
    alike = write_report(write_sweep(tmp_path / "alike", device="cuda", impls=("torch",), repeats=3)).markdown
    assert (
        "The plots leave out" not in alike.read_text()
        and "Repeats differ" not in alike.read_text()
        and " of 3" not in alike.read_text()
    )


def test_no_speed_is_claimed_of_several_versions_of_the_code(tmp_path: Path) -> None:
    def newer(run: AttemptRecord) -> None:
        if run.spec.repeat == 2:
            run.environment["digests"]["code"] = "newer"

    text = write_report(write_sweep(tmp_path, repeats=3, edit=newer)).markdown.read_text()
    assert "| 1.25x (over 3 pairs) | INCONCLUSIVE |" in text and "`torch_compile` (A1) measured 1.25x (3 pairs)" in text
    assert "INCONCLUSIVE, because its repeats ran different code, libraries or data; run all of them again" in text


def test_a_cell_has_one_step_time_and_one_peak(tmp_path: Path) -> None:
    def slower(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["step_time_ms"] = (16.0 if run.spec.graphed else 20.0) * 1.2**run.spec.repeat

    text = report_text(write_sweep(tmp_path, device="cuda", repeats=3, edit=slower))
    (ranked,) = re.findall(r"^\| 1 \| A1 .*? \| (\d+\.\d\d) ms \(", text, flags=re.MULTILINE)
    (compared,) = re.findall(r"^\| A1 .*? \| \d+\.\d\d / (\d+\.\d\d) ms \|", text, flags=re.MULTILINE)
    assert ranked == compared
    (first,) = re.findall(r"^\| A1 \| BITWISE \|.* to (\d\.\d\d) \| proven", text, flags=re.MULTILINE)
    (in_ranking,) = re.findall(r"^\| 1 \| A1 .*? (\d\.\d\d) GiB", text, flags=re.MULTILINE)
    assert first == in_ranking


def test_nothing_run_is_said_first_and_does_not_pass(tmp_path: Path) -> None:
    never, not_here = (workload_spec(0, impl, 120) for impl in ("torch", "local"))
    extra = [Extra(never, (HOST,)), Extra(not_here, (HOST,), "not_runnable")]
    report = write_report(write_sweep(tmp_path, workloads=0, extra=extra))
    assert report.exit_code == 4
    assert report.summary.startswith(
        f"**Nothing was validated**: no graphed cell could run. Not validated: `torch, lr 0.001`; "
        f"`local, lr 0.001` ({HOST.rule}: {HOST.message}). Fix: {HOST.remedy}. "
    )
    assert "No cell ran: 1 cell rejected by a rule and 1 cell not runnable on this host or cluster." in report.summary
    assert "## Plots" not in report.markdown.read_text()
    other = replace(HOST, remedy="capture another scope")
    several = write_report(write_sweep(tmp_path / "two", workloads=0, extra=[extra[0], Extra(not_here, (other,))]))
    assert f"{HOST.message}). The report has the fixes." in several.summary and "Fix:" not in several.summary


def test_expected_failures_are_counted_as_such(tmp_path: Path) -> None:
    def oom(run: AttemptRecord) -> None:
        if run.spec.graphed:
            run.outcome = Outcome("CUDA_OOM", "capture", "bundle000", 0.0, 1.0)

    report = write_report(write_sweep(tmp_path, edit=oom, expect=Expectation("CUDA_OOM", "capture")))
    assert report.exit_code == 0
    assert "1 cell failed as expected" in report.summary
    assert "(as expected) in phase capture" in report.markdown.read_text()


def test_plots_are_bounded_worst_first_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_diverges(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.training.learning_rate == pytest.approx(4e-3):
            run.metrics[10]["loss"] += 1.0

    monkeypatch.setattr("analysis.report.selection.MAXIMUM_WORKLOADS", 2)
    sweep = write_sweep(tmp_path, workloads=4, repeats=1, steps=16, edit=last_diverges)
    stale = sweep.report / "plots" / "0000000000-loss.png"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"")
    report = write_report(sweep)
    content = json.loads(report.json.read_text())
    assert not stale.exists()
    assert content["plots"]["drawn"].keys() >= {"sweep"} and len(content["plots"]["drawn"]) == 3
    assert len(content["plots"]["left_out_workloads"]) == 2
    assert list(content["plots"]["drawn"])[1] == workload_spec(3, "none", 16).workload_id
    assert "They leave out `eager, lr 0.002`, `eager, lr 0.003`." in report.markdown.read_text()


def test_tables_are_bounded_and_hold_the_worst_workloads_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def third_diverges(run: AttemptRecord) -> None:
        if run.spec.graphed and run.spec.training.learning_rate == pytest.approx(3e-3):
            run.metrics[10]["loss"] += 1.0

    monkeypatch.setattr("analysis.report.selection.MAXIMUM_ROWS", 5)
    report = write_report(write_sweep(tmp_path, workloads=3, repeats=1, steps=16, edit=third_diverges))
    text = report.markdown.read_text()
    assert "The tables show 4 of 6 cells, worst news first." in text
    evidence = text[text.index("## Evidence") :]
    assert "| C1 |" in evidence and "| A1 |" in evidence and "| B1 |" not in evidence
    assert len(json.loads(report.json.read_text())["cells"]) == 6
    brief = json.loads((report.json.parent / "summary.json").read_text())
    assert [cell["label"][-8:] for cell in brief["cells"]] == ["lr 0.001"] * 2 + ["lr 0.003"] * 2
    assert (brief["total_cells"], brief["exit_code"]) == (6, report.exit_code)


def test_runs_that_differ_in_provenance_are_told_apart(tmp_path: Path) -> None:
    def second_host(run: AttemptRecord) -> None:
        if run.spec.repeat:
            run.environment["hardware"]["hosts"] = ["host1"]
        if run.spec.graphed:
            run.environment["settings"]["NCCL_ALGO"] = "Ring"

    text = report_text(write_sweep(tmp_path, edit=second_host))
    assert "| hardware.hosts | host0 (2 runs); host1 (2 runs) |" in text
    assert "settings.NCCL_ALGO: unset (eager), Ring (graphed)" in text


def all_nan(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["loss"] = step["grad_norm"] = float("nan")


def mixed_infinities(run: AttemptRecord) -> None:
    for step in run.metrics[:: 2 + run.spec.repeat]:
        step["loss"] = float("inf")


def no_times(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["step_time_ms"] = float("nan")
        step["loss"] += 5 * run.spec.graphed


def no_metrics(run: AttemptRecord) -> None:
    run.metrics = []


def no_events(run: AttemptRecord) -> None:
    run.events = {}


def no_eager_metrics(run: AttemptRecord) -> None:
    if not run.spec.graphed:
        run.metrics = []


def doubled_steps(run: AttemptRecord) -> None:
    run.metrics = [step for step in run.metrics for _ in range(2)]


def no_norms(run: AttemptRecord) -> None:
    for step in run.metrics:
        step["grad_norm"] = -1.0


def odd_environment(run: AttemptRecord) -> None:
    run.environment = {"digests": "none", "hardware": None, "versions": ["a", "a"]}


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    "edit",
    [
        all_nan,
        mixed_infinities,
        no_times,
        no_metrics,
        no_events,
        no_eager_metrics,
        doubled_steps,
        no_norms,
        odd_environment,
    ],
)
def test_a_report_is_written_of_any_records_and_bad_ones_never_pass(tmp_path: Path, edit: Edit) -> None:
    report = write_report(write_sweep(tmp_path, edit=edit))
    assert report.exit_code in (3, 4)
    assert report.markdown.exists()


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("size", [1e308, 5e-324])
def test_a_plot_that_cannot_be_drawn_costs_that_plot(tmp_path: Path, size: float) -> None:
    def beyond(run: AttemptRecord) -> None:
        for step in run.metrics:
            step["loss"] = -size if run.spec.graphed else size

    report = write_report(write_sweep(tmp_path, edit=beyond))
    plots, text = json.loads(report.json.read_text())["plots"], report.markdown.read_text()
    (lost,) = plots["undrawn"]
    assert lost.endswith("-loss.png") and f"Loss and its difference: {lost} cannot be drawn (" in text
    drawn = [file for files in plots["drawn"].values() for file in files if file != "plots/speedups.png"]
    assert len(drawn) == 3 and all((report.json.parent / file).exists() for file in drawn)
    assert lost not in drawn and f"({lost})" not in text and not (report.json.parent / lost).exists()
    assert (report.json.parent / "report.html").read_text().count("<figure>") == sum(map(len, plots["drawn"].values()))


def test_of_a_run_that_never_was_nobody_knows_what_it_captured(tmp_path: Path) -> None:
    def not_run(run: AttemptRecord) -> None:
        run.begun = not run.spec.graphed

    markdown = report_text(write_sweep(tmp_path, edit=not_run))
    assert (
        "| `torch_compile, lr 0.001` | - | torch_compile | NOT RUN |" in markdown
        and "| A1 | **UNFINISHED** |" in markdown
    )
    assert (
        "- **NOT RUN** A1, repeats 0, 1: no attempt has begun. Fix: run `python -m orchestrator resume` on the sweep.\n"
        in markdown
    )


def test_a_failure_of_the_perturbed_run_is_no_failure_of_a_repeat(tmp_path: Path) -> None:
    def cancelled(run: AttemptRecord) -> None:
        if run.spec.perturbed:
            run.outcome = Outcome("CANCELLED", "init", "b", 0.0, 1.0, failure_class="CANCELLED", message="cancelled")

    markdown = report_text(write_sweep(tmp_path, perturbed=True, edit=cancelled))
    assert "class CANCELLED; A0, the perturbed run, attempt 1: cancelled." in markdown


def test_the_steps_that_a_run_lost_are_named_after_the_run(tmp_path: Path) -> None:
    def torn(run: AttemptRecord) -> None:
        del run.metrics[-2:]

    assert re.search(
        r"\(torch_compile-\w+-r0: steps 118, 119 missing of 120; fix: ", report_text(write_sweep(tmp_path, edit=torn))
    )
