"""Read the history of a run from the file that W&B writes in addition to its upload, or offline (``run-*.wandb``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from analysis.curves.curve import CurveError, Digits, Row
from launch.contract.metric_names import column_of

_READER = (sys.executable, "-m", "wandb", "leet", "inspect", "--json")


def read_history(path: Path) -> Iterator[Row]:
    """Yield what each call of ``wandb.log`` wrote, read with W&B's own reader.

    Raises:
        CurveError: the file cannot be read.
    """
    if not path.is_file():
        raise CurveError(f"{path}: No such file")
    environment = {**os.environ, "WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(
        [*_READER, str(path.absolute())], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        error = (done.stderr.strip().splitlines() or [f"its reader ended with {done.returncode}"])[-1]
        raise CurveError(f"{path}: W&B cannot read it: {error}")
    for line in done.stdout.splitlines():
        record = json.loads(line, parse_float=Digits)
        if record["type"] == "history":
            yield f"{path}, record {record['num']}", _own_step(record["history"]["item"])


def _own_step(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``row`` without W&B's count of calls if the program numbers its steps."""
    numbered = any(name != "_step" and column_of(name) == "step" for name in row)
    return {name: value for name, value in row.items() if name != "_step" or not numbered}
