"""Print a short form of a report, or a whole document of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.common.atomic_files import number, read_json
from launch.common.text import align, count
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.sweeps.report_process import TRACK_SECONDS, is_tracked

MOST_ROWS = 40
"""The most cells that are printed. The report has all."""


def print_report(paths: SweepPaths) -> None:
    """Print the summary, a row for each cell, and the report's path."""
    content = read_json(paths.report / "summary.json")
    summary = content["summary"]
    lines = ["", *filter(None, [summary["headline"]]), *(f"- {note}" for note in summary["notes"])]
    print("\n".join(lines).replace("`", "").replace("**", ""))
    rows: list[tuple[str, ...]] = [
        ("cell", "outcome", "loss verdict", "largest difference", "eager / graphed step time")
    ]
    rows += [_report_row(cell) for cell in content["cells"]]
    if content["cells"]:
        print("", *align(rows[: MOST_ROWS + 1]), sep="\n")
    if content["total_cells"] > MOST_ROWS:
        print(f"... and {content['total_cells'] - MOST_ROWS} more cells in the report")
    print(f"\nreport: {paths.report / 'report.md'}")


def print_tracking(paths: SweepPaths, plan: Plan) -> None:
    """Print that the command waits for the tracker before it prints the report, if the sweep is tracked."""
    if is_tracked(paths, plan):
        print(f"waiting for the tracking process, for at most {TRACK_SECONDS:g} s", flush=True)


def print_delivered(said: str) -> None:
    """Print what trackers reported: where the runs are, or how to upload them."""
    if said:
        print(said)


def _report_row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    verdict, speed, difference = cell["verdict"], cell["speed"], cell["max_loss_difference"]
    outcome = cell["outcome"] + (" (unexpected)" if cell["unexpected"] else "")
    word = verdict["verdict"] if verdict else "reference" if cell["impl"] == "none" else "-"
    loss = "-" if difference is None else f"{number(difference):.2g}"
    return (f"{cell['name']} {cell['label']}", outcome, word, loss, _format_speed(speed) if speed else "-")


def _format_speed(speed: Mapping[str, Any]) -> str:
    ratio = f"{number(speed['ratio']):.2f}x over {count('pair', speed['pairs'])}"
    return f"{ratio}, {speed['verdict'] or 'no verdict'}"


def print_document(path: Path, kind: str) -> None:
    """Print a document that was written to ``path``, then its path."""
    print(f"\n{path.read_text()}\n{kind}: {path}")
