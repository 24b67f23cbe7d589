"""Writes every step of every run as one tidy table, for analyses that the report does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import BinaryIO

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from analysis.records.load import Records
from analysis.records.run import Attempt, Run
from analysis.records.steps import Steps
from launch.contract.plan import Cell

WORD = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [("run_id", WORD), ("cell", WORD), ("workload_id", WORD), ("graphed", pa.bool_()), ("repeat", pa.int64()),
     ("attempt", pa.int64()), ("step", pa.int64()), ("loss", pa.float64()), ("grad_norm", pa.float64()),
     ("step_time_ms", pa.float64()), ("tokens", pa.int64()), ("phase", WORD)]
)  # fmt: skip
STEP_COLUMNS = tuple(field.name for field in fields(Steps))
ROWS = 1 << 14
"""The rows that begin a row group: few enough for memory, enough to keep the file's footer short."""


@contextmanager
def steps_writer(file: BinaryIO) -> Iterator[Callable[[Records], None]]:
    """Give a function that appends the steps of records to steps.parquet: a row per step of each run's attempt that counts.
    The same records in the same order give the same bytes."""
    tables: list[pd.DataFrame] = []

    def write_group(least_rows: int) -> None:
        count = sum(map(len, tables))
        if count >= least_rows:
            rows = pd.concat(tables, ignore_index=True)
            # Column by column, since a DataFrame's NaN would become a missing value.
            columns = {name: rows[name].to_numpy() for name in SCHEMA.names}
            writer.write_table(pa.Table.from_pydict(columns, SCHEMA), row_group_size=count)
            tables.clear()

    def append(records: Records) -> None:
        runs = ((cell, run) for cell in records.plan.cells for run in records.runs.get(cell.cell_id, ()))
        tables.extend(_steps_of(cell, run, run.attempt) for cell, run in runs if run.attempt and len(run.attempt.steps))
        write_group(ROWS)

    with parquet.ParquetWriter(file, SCHEMA) as writer:
        yield append
        write_group(1)


def _steps_of(cell: Cell, run: Run, attempt: Attempt) -> pd.DataFrame:
    origin = {
        "run_id": run.run_id,
        "cell": cell.label,
        "workload_id": cell.workload_id,
        "graphed": cell.graphed,
        "repeat": run.repeat,
        "attempt": attempt.number,
    }
    return pd.DataFrame(origin | {name: getattr(attempt.steps, name) for name in STEP_COLUMNS})
