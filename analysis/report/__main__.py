"""`python -m analysis.report SWEEP_FOLDER`: write the report of a sweep."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from analysis.report.write_report import write_report
from launch.common.atomic_files import FULL, MISPLACED, RecordError, explain
from launch.contract.paths import SweepPaths


def main(arguments: list[str]) -> int:
    """Write the report and return 0, whatever its verdicts, or 1 if it could not be written."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m analysis.report SWEEP_FOLDER\n")
        return 1
    try:
        write_report(SweepPaths(Path(arguments[0])))
    except (OSError, RecordError) as error:
        sys.stderr.write(f"{_describe(error)}\n")
        return 1
    return 0


def _describe(error: OSError | RecordError) -> str:
    if isinstance(error, RecordError) or error.errno in MISPLACED:
        return explain(error)
    return f"{error.strerror}; free space there" if error.errno in FULL else str(error.strerror)


if __name__ == "__main__":
    # Records form no reference cycles. Searching them for cycles would take a tenth of the time.
    gc.set_threshold(100_000)
    sys.exit(main(sys.argv[1:]))
