"""Test what the report says about memory: whether a cell's runs fit, peaks and forecasts by phase."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.records.load import load
from analysis.report.json_report import report_to_json
from analysis.report.report_data import report_data
from analysis.sweep.judge_cells import compare_cells
from analysis.sweep.judge_sweep import judge_sweep
from analysis.sweep.memory_fit import state_of, states_of
from launch.contract.outcomes import Outcome, OutcomeName
from launch.contract.records.events import Phase
from tests.records import AttemptRecord, Edit, write_sweep
from tests.report_text import report_text

Ending = tuple[OutcomeName, Phase] | None


def ends(eager: Ending, graphed: Ending, of_repeats: tuple[int, ...] = (0, 1)) -> Edit:
    def edit(run: AttemptRecord) -> None:
        ending = graphed if run.spec.graphed else eager
        if ending is not None and run.spec.repeat in of_repeats:
            run.outcome = Outcome(*ending, "bundle000", 0.0, 1.0)

    return edit


@pytest.mark.parametrize(
    ("eager", "graphed", "states"),
    [
        (None, None, ("fits", "fits")),
        (None, ("CUDA_OOM", "capture"), ("fits", "OOM at capture")),
        (None, ("CUDA_OOM", "measure"), ("fits", "OOM at replay")),
        (None, ("CUDA_OOM", "settle"), ("fits", "OOM at replay")),
        (None, ("CUDA_OOM", "warmup"), ("fits", "OOM before capture")),
        (("CUDA_OOM", "measure"), ("CUDA_OOM", "build"), ("OOM", "OOM before capture")),
        (("CUDA_OOM", "warmup"), None, ("OOM", "fits")),
        (None, ("HOST_OOM", "capture"), ("fits", "host OOM")),
        (None, ("CAPTURE_FAILED", "capture"), ("fits", "CAPTURE_FAILED")),
        (None, ("TEARDOWN_HANG", "teardown"), ("fits", "fits")),
        (("NUMERIC", "measure"), ("HANG", "measure"), ("NUMERIC", "HANG")),
    ],
)
def test_a_state_says_where_memory_ended(
    tmp_path: Path, eager: Ending, graphed: Ending, states: tuple[str, str]
) -> None:
    results = compare_cells(load(write_sweep(tmp_path, edit=ends(eager, graphed))))
    assert tuple(map(state_of, results)) == states


def test_repeats_that_end_otherwise_are_counted_by_what_says_most_of_memory(tmp_path: Path) -> None:
    _, graphed = compare_cells(load(write_sweep(tmp_path, edit=ends(None, ("CUDA_OOM", "capture"), (1,)))))
    assert (state_of(graphed), states_of(graphed)) == ("OOM at capture", "OOM at capture (1 of 2 runs)")


def test_what_has_not_ended_does_not_fit_yet(tmp_path: Path) -> None:
    def unfinished(run: AttemptRecord) -> None:
        run.begun = run.spec.repeat == 0 or not run.spec.graphed

    _, graphed = compare_cells(load(write_sweep(tmp_path, edit=unfinished)))
    assert states_of(graphed) == "not ended (1 of 2 runs)"


def test_the_report_has_the_phases(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, device="cuda", impls=("torch", "full_iteration"), edit=one_is_too_large)
    text = report_text(sweep).split("## Memory")[1].split("\n## ")[0]
    peaks, parts, forecasts = (line for line in text.splitlines() if line.startswith("| A1 |"))
    assert peaks.split(" | ")[1:] == [
        "fits", "3.02 GiB", "4.62 GiB", "5.42 GiB", "5.27 GiB", "5.27 GiB", "+256 MiB", "134.58 GiB of 140.00 GiB (96%) |",
    ]  # fmt: skip
    assert parts == "| A1 | 3 MiB | 4.52 GiB | 256 MiB | 512 MiB | 5.27 GiB |"
    measured, expected = (forecasts.split(" | ")[number::2] for number in (1, 2))
    assert measured == ["4.62 GiB", "5.42 GiB", "5.27 GiB"]
    assert [words.split()[1].rstrip("|") for words in expected] == ["MiB"] * 3
    content = report_to_json(report_data(judge_sweep(sweep)))
    of_cells = [cell["memory_forecast"] for cell in content["cells"]]
    assert [list(phases) for phases in of_cells] == [["warmup", "measure"], *[["warmup", "capture", "measure"]] * 2]
    assert all(0 < peak["allocated"] < peak["device"] for phases in of_cells for peak in phases.values())
    failed = next(line for line in text.splitlines() if line.startswith("| A2 |"))
    assert failed.startswith("| A2 | OOM at capture | ") and failed.endswith("| - |"), (
        "no headroom is told of a phase that ran out of memory"
    )


def one_is_too_large(run: AttemptRecord) -> None:
    if run.spec.cuda_graph.impl == "full_iteration":
        run.outcome = Outcome("CUDA_OOM", "capture", "bundle000", 0.0, 1.0)
