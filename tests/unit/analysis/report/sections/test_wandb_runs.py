"""Test links from a report to its runs in Weights & Biases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from analysis.records.wandb_runs import WandbRuns, wandb_runs
from analysis.report.report_data import report_data
from analysis.report.sections.wandb_runs import ON_DISK, render
from analysis.sweep.judge_sweep import judge_sweep
from tests.records import write_sweep

PROJECT = "https://wandb.example/me/graphs"


def test_runs_are_linked_where_online_and_uploaded_where_on_disk(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, steps=20)
    data = report_data(judge_sweep(sweep))
    run_ids = [run.run_id for result in data.ran for run in result.runs]
    assert wandb_runs(sweep, run_ids) == WandbRuns() and render(data) == []

    offline, uploaded = (f"wandb/offline-run-20261123_1408{at}-{run}-0123abcd" for at, run in enumerate(run_ids[:2]))
    (sweep.tracking / offline).mkdir(parents=True)
    (sweep.tracking / "id").write_text("0123abcd")
    found = wandb_runs(sweep, run_ids)
    assert found == WandbRuns({}, tuple(run_ids[:1]))
    assert render(replace(data, wandb=found))[1:] == [ON_DISK]

    (sweep.tracking / uploaded).mkdir()
    (sweep.tracking / uploaded / "run-1.wandb.synced").touch()
    (sweep.tracking / "project_url").write_text(PROJECT)
    found = wandb_runs(sweep, run_ids)
    assert found.urls == {run: f"{PROJECT}/runs/{run}-0123abcd" for run in [*run_ids[1:], "analysis"]}
    text = "\n".join(render(replace(data, wandb=found)))
    assert f"| A0 | [1]({found.urls[run_ids[1]]}) |" in text and f"({PROJECT}/runs/analysis-0123abcd)" in text


def test_a_link_is_an_address_and_nothing_else(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, steps=20)
    sweep.tracking.mkdir()
    (sweep.tracking / "id").write_text("0123abcd")
    for address in ("javascript:alert(1)", f"{PROJECT}) ![a](b", f"{PROJECT}\nmore", ""):
        (sweep.tracking / "project_url").write_text(address)
        assert wandb_runs(sweep, ["run"]) == WandbRuns()
