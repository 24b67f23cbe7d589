"""Links to the runs in Weights & Biases, or how to upload them."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import table
from analysis.sweep.cell_results import CellResult

ON_DISK = "Some runs have not been uploaded; they are in `tracking/wandb`. Upload them from the sweep's folder: `wandb sync tracking/wandb/offline-run-*`."


def render(report: ReportData) -> list[str]:
    urls = report.wandb.urls
    cells = [(result.name, links) for result in report.shown if (links := _links(result, urls))]
    blocks = [f"[Report and verdicts]({urls['analysis']}).", table(("cell", "runs by repeat"), cells)] if cells else []
    # No number: the last tracker may not have made its folder yet.
    blocks += [ON_DISK] if report.wandb.offline else []
    return ["## Runs in Weights & Biases", *blocks] if blocks else []


def _links(result: CellResult, urls: Mapping[str, str]) -> str:
    runs = [run for run in result.runs if run.run_id in urls]
    return ", ".join(f"[{'perturbed' if run.perturbed else run.repeat}]({urls[run.run_id]})" for run in runs)
