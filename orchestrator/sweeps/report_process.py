"""Write the report in a separate process, so that a watching command never loads the code that judges and draws."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from launch.common.atomic_files import RecordError, read_json
from launch.contract.exit_codes import ExitCode
from launch.contract.paths import SweepPaths
from launch.contract.plan import Plan
from orchestrator.errors import SystemFault
from orchestrator.sweeps.run_state import RunState

TRACK_SECONDS = 180.0
"""How long a command waits for Weights & Biases after it has written a report."""


def write_report(sweep: SweepPaths) -> None:
    """Write the report of ``sweep``.

    Raises:
        SystemFault: the report could not be written.
    """
    command = [sys.executable, "-m", "analysis.report", str(sweep.root)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        errors = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
        raise SystemFault(f"{sweep.report}: cannot be written ({errors[-1]}); to see more: {' '.join(command)}")


def is_tracked(sweep: SweepPaths, plan: Plan) -> bool:
    """Return whether the report of ``plan`` goes to Weights & Biases: not before a run has begun."""
    wanted = plan.tracking is not None and plan.tracking["mode"] != "disabled"
    return wanted and any(sweep.run(run_id).attempt_numbers() for run_id in plan.cell_of_run())


def track_report(sweep: SweepPaths, plan: Plan) -> str:
    """Send the report on disk to the plan's trackers. Return their answer: where it is, or how to upload it."""
    if not is_tracked(sweep, plan):
        return ""
    command = [sys.executable, "-m", "launch.track", str(sweep.root), "--settings", json.dumps(plan.tracking)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TRACK_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"tracking {plan.name}: not delivered to Weights & Biases within {TRACK_SECONDS:g} s; report {plan.name} tries again"
    return done.stdout.strip()


def read_records_digest(sweep: SweepPaths) -> str:
    """Return the digest of the records behind the report on disk; "" if the report is missing or damaged."""
    whole = all((sweep.report / name).is_file() for name in ("report.md", "report.json"))
    return str(_read_summary(sweep, "records", "")) if whole else ""


def read_needed_runs(sweep: SweepPaths, plan: Plan, states: Mapping[str, RunState]) -> frozenset[str]:
    """Return the runs that verdicts of the report on disk need and that are not in ``states``, because nobody ordered them.

    Return none if the report is missing or damaged.
    """
    unordered = plan.runs_if_needed - states.keys()
    return unordered & set(_read_summary(sweep, "needed_runs", ())) if unordered else unordered


def _read_summary(sweep: SweepPaths, name: str, missing: Any) -> Any:
    try:
        return read_json(sweep.report / "summary.json")[name]
    except (FileNotFoundError, RecordError, KeyError, TypeError):
        return missing


def read_exit_code(sweep: SweepPaths, *, allow_empty: bool) -> ExitCode:
    """Return the exit code of the report on disk.

    With ``allow_empty``, return 0 if the report's only fault is that graphed cells could not run, or that it has none.
    """
    content = read_json(sweep.report / "summary.json")
    code, summary = ExitCode(content["exit_code"]), content["summary"]
    undecided = "INCONCLUSIVE" in summary["verdicts"]
    allowed = allow_empty and bool(summary["unvalidated"]) and code == ExitCode.INCONCLUSIVE and not undecided
    return ExitCode.PASS if allowed else code
