"""Write the report in a process of its own, so that a command that watches a sweep never loads what judges and draws."""

from __future__ import annotations

import subprocess
import sys

from launch.common.atomic_files import read_json
from launch.contract.paths import SweepPaths
from orchestrator.errors import SystemFault


def write_report(sweep: SweepPaths) -> int:
    """Write the report of ``sweep``. Return its exit code (analysis.sweep.cell_results.exit_code).

    Raises:
        SystemFault: it could not be written.
    """
    command = [sys.executable, "-m", "analysis.report", str(sweep.root)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        errors = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
        raise SystemFault(
            f"{sweep.report}: cannot be written ({errors[-1]}); free space there, or choose another place with --store; "
            f"to see more: {' '.join(command)}"
        )
    return int(read_json(sweep.report / "summary.json")["exit_code"])
