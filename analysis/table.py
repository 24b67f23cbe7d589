"""Every step of every run as one tidy table, for whoever wants to look further than the report does."""

from __future__ import annotations

import io
from dataclasses import fields

import pandas as pd

from analysis.load import Attempt, Records, Run
from analysis.steps import Steps
from launch.record import Cell

WORDS = ("run_id", "cell", "workload_id", "phase")
STEP_COLUMNS = tuple(field.name for field in fields(Steps))


def steps_table(records: Records) -> pd.DataFrame:
    """A row a step of each run's attempt that the report goes by.

    Columns: run_id, cell, workload_id, graphed, repeat, attempt, then those of metrics.jsonl. The words are categories.
    """
    parts = [
        _steps_of(cell, run, run.attempt)
        for cell in records.plan.cells
        for run in records.runs.get(cell.cell_id, ())
        if run.attempt is not None
    ]
    if not parts:
        return pd.DataFrame(columns=[*WORDS[:3], "graphed", "repeat", "attempt", *STEP_COLUMNS])
    return pd.concat(parts, ignore_index=True).astype(dict.fromkeys(WORDS, "category"))


def parquet_of(table: pd.DataFrame) -> bytes:
    """``table`` as a Parquet file; the same table gives the same bytes."""
    content = io.BytesIO()
    table.to_parquet(content, engine="pyarrow", index=False)
    return content.getvalue()


def _steps_of(cell: Cell, run: Run, attempt: Attempt) -> pd.DataFrame:
    said = {
        "run_id": run.run_id,
        "cell": cell.label,
        "workload_id": cell.workload_id,
        "graphed": cell.graphed,
        "repeat": run.repeat,
        "attempt": attempt.number,
    }
    return pd.DataFrame(said | {name: getattr(attempt.steps, name) for name in STEP_COLUMNS})
