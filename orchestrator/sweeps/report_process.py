"""The report is written by a process of its own: what draws and judges goes when it is written, so that the command that
watches a sweep stays small, and a sweep that has nothing to do answers without loading any of it."""

from __future__ import annotations

import subprocess
import sys

from launch.common.atomic_files import read_json
from launch.contract.paths import SweepPaths
from orchestrator.errors import SystemFault


def write_report(sweep: SweepPaths) -> int:
    """Have the report of ``sweep`` written; the value is its exit code (analysis.sweep.cell_results.exit_code).

    Raises:
        SystemFault: it could not be.
    """
    command = [sys.executable, "-m", "analysis.report", str(sweep.root)]
    made = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if made.returncode != 0:
        said = made.stderr.strip().splitlines() or [f"its process ended with {made.returncode}"]
        raise SystemFault(
            f"{sweep.report}: cannot be written ({said[-1]}); make room there, or choose another place with --store; "
            f"to see more: {' '.join(command)}"
        )
    return int(read_json(sweep.report / "summary.json")["exit_code"])
