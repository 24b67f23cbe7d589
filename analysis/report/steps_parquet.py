"""Write every step of every run as one table, for analyses that the report does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, BinaryIO

import numpy as np
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
_REPEATING = [field.name for field in SCHEMA if field.type != pa.float64()]
"""Columns with few values. A dictionary of measured numbers would cost half of the writing and save nothing."""
ROWS = 1 << 14
"""The least rows of a row group: few enough for memory, and enough to keep the file's footer short."""


@contextmanager
def steps_writer(file: BinaryIO) -> Iterator[Callable[[Records], None]]:
    """Yield a function that appends the steps of records to steps.parquet.

    There is one row for each step of each run's attempt that counts. The same records in the same order give the same bytes.
    """
    group: list[tuple[dict[str, Any], Steps]] = []

    def write_group(least_rows: int) -> None:
        if sum(len(steps) for _, steps in group) >= least_rows:
            table = _table(group)
            writer.write_table(table, row_group_size=len(table))
            group.clear()

    def append(records: Records) -> None:
        runs = ((cell, run) for cell in records.plan.cells for run in records.runs.get(cell.cell_id, ()))
        group.extend(
            (_origin(cell, run, run.attempt), run.attempt.steps)
            for cell, run in runs
            if run.attempt and len(run.attempt.steps)
        )
        write_group(ROWS)

    with parquet.ParquetWriter(file, SCHEMA, use_dictionary=_REPEATING) as writer:
        yield append
        write_group(1)


def _table(group: Sequence[tuple[dict[str, Any], Steps]]) -> pa.Table:
    """Return the steps of all runs in ``group``. Each row has the origin of its run."""
    of_row = np.repeat(np.arange(len(group)), [len(steps) for _, steps in group])
    origins = pd.DataFrame([origin for origin, _ in group])
    columns = {name: pa.array(origins[name], SCHEMA.field(name).type).take(of_row) for name in origins}
    # A DataFrame would turn NaN into a missing value.
    for name in STEP_COLUMNS:
        columns[name] = pa.array(np.concatenate([getattr(steps, name) for _, steps in group]))
    return pa.Table.from_pydict(
        {name: column.cast(SCHEMA.field(name).type) for name, column in columns.items()}, SCHEMA
    )


def _origin(cell: Cell, run: Run, attempt: Attempt) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "cell": cell.label,
        "workload_id": cell.workload_id,
        "graphed": cell.graphed,
        "repeat": run.repeat,
        "attempt": attempt.number,
    }
