"""Every step of every run as one tidy table, for whoever wants to look further than the report does."""

from __future__ import annotations

from dataclasses import fields
from types import TracebackType
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
"""From how many rows on a row group is written: few enough to be held, enough for the file's footer to stay short."""


class StepsFile:
    """The writer of steps.parquet: a row a step of each run's attempt that the report goes by, a row group at a time. The
    same records in the same order give the same bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._writer = parquet.ParquetWriter(file, SCHEMA)
        self._held: list[pd.DataFrame] = []
        self._rows = 0

    def __enter__(self) -> StepsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rows and error is None:
            self._write_group()
        self._writer.close()

    def write(self, records: Records) -> None:
        for cell in records.plan.cells:
            for run in records.runs.get(cell.cell_id, ()):
                if run.attempt is not None and len(run.attempt.steps):
                    self._held.append(_steps_of(cell, run, run.attempt))
                    self._rows += len(self._held[-1])
        if self._rows >= ROWS:
            self._write_group()

    def _write_group(self) -> None:
        rows = pd.concat(self._held, ignore_index=True)
        columns = {name: rows[name].to_numpy() for name in SCHEMA.names}  # a DataFrame's NaN would be no value at all
        self._writer.write_table(pa.Table.from_pydict(columns, SCHEMA), row_group_size=self._rows)
        self._held, self._rows = [], 0


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
