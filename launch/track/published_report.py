"""The report of a sweep in Weights & Biases: a run with its verdicts, and the verdict of each run that was tracked."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launch.contract.paths import SweepPaths
from launch.track.attempt_content import GIB
from launch.track.settings import TrackSettings
from launch.track.weights_and_biases import Session, remove_superseded, sweep_token

COLUMNS = (
    "cell", "label", "outcome", "verdict", "speedup", "speedup_low", "speedup_high", "speed_verdict", "peak_memory_gib",
)  # fmt: skip
VERDICT_SECONDS = 15.0
"""How long the summaries of runs may take. With the upload before, it is less than orchestrator.sweeps.report_process waits."""
MOST_SUMMARISED = 100
"""The most cells in the summary of a report's run. The table has all cells."""


def publish_report(sweep: SweepPaths, settings: TrackSettings, say: Callable[[str], None]) -> None:
    """Log the report on disk as a run of job type ``analysis``: its table of verdicts, its speed-ups and report.html."""
    with Session(sweep, "analysis", settings, say) as session:
        if session.mode == "disabled":
            return
        import wandb

        content = json.loads((sweep.report / "report.json").read_text())
        rows = verdict_rows(content)
        shutil.rmtree(sweep.tracking / "data", ignore_errors=True)
        run = session.open("analysis", "analysis", (), {"sweep": content["sweep"], "recipe": content["recipe"]})
        table = wandb.Table(columns=list(COLUMNS), data=list(rows))
        speeds = wandb.plot.bar(table, "cell", "speedup", title="Speed-up over eager")
        run.log({"verdicts": table, "speedups": speeds})
        run.summary.update(report_summary(content, rows))
        artifact = wandb.Artifact(f"report-{run.id.removeprefix('analysis-')}", type="report")
        artifact.add_file(str(sweep.report / "report.html"))
        run.log_artifact(artifact)
        run.finish()
        remove_superseded(run)
        if session.mode == "offline":
            say("run report again after the upload: only then do the runs in W&B get their verdicts")
        else:
            add_verdicts(f"{run.entity}/{run.project}", sweep_token(sweep.tracking), content, say)


def add_verdicts(project: str, token: str, content: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Add the results of each cell to the W&B summaries of its runs, as far as possible within :data:`VERDICT_SECONDS`."""
    import wandb

    summaries, done, deadline = run_summaries(content), 0, time.monotonic() + VERDICT_SECONDS
    missing = f"within {VERDICT_SECONDS:g} s"
    api: Any = wandb.Api(timeout=round(VERDICT_SECONDS))
    for run_id, summary in summaries.items():
        if time.monotonic() > deadline:
            break
        try:
            api.run(f"{project}/{run_id}-{token}").summary.update(summary)
            done += 1
        except (wandb.errors.Error, ValueError) as error:
            # A run that was never uploaded does not exist.
            missing = next(iter(str(error).splitlines()), type(error).__name__)
    if done < len(summaries):
        say(
            f"{done} of {len(summaries)} runs have their verdict in W&B ({missing}); the W&B run named analysis has all verdicts"
        )


def run_summaries(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return each cell's results in report.json as report/COLUMN, for each of its runs by id. Unknown values are left out."""
    summaries: dict[str, dict[str, Any]] = {}
    for cell, row in zip(content["cells"], verdict_rows(content), strict=True):
        known = {f"report/{name}": value for name, value in zip(COLUMNS, row, strict=True) if value is not None}
        summaries |= {run["run_id"]: known for run in cell["runs"]}
    return summaries


def verdict_rows(content: Mapping[str, Any]) -> list[Sequence[Any]]:
    """Return a row of ``COLUMNS`` for each cell of report.json. Unknown values are None."""
    return [
        [
            cell["name"],
            cell["label"],
            cell["outcome"],
            (cell["verdict"] or {}).get("verdict"),
            *((cell["speed"] or {}).get(key) for key in ("ratio", "low", "high", "verdict")),
            cell["memory"]["peak"] / GIB if cell["memory"] else None,
        ]
        for cell in content["cells"]
    ]


def report_summary(content: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the headline, the exit code, and the known values of each cell as NAME/COLUMN."""
    summary: dict[str, Any] = {"headline": content["summary"]["headline"], "exit_code": content["exit_code"]}
    for name, *values in rows[:MOST_SUMMARISED]:
        summary |= {
            f"{name}/{column}": value for column, value in zip(COLUMNS[1:], values, strict=True) if value is not None
        }
    return summary
