"""Write the records of runs that were made elsewhere, as far as their logs show them."""

from __future__ import annotations

import numpy as np

from analysis.curves.curve import Curve
from analysis.curves.curve_files import CurveFiles
from launch.common.atomic_files import JsonLines, write_json
from launch.common.redact import redact
from launch.contract.outcomes import Outcome, outcome_to_json
from launch.contract.paths import AttemptPaths, SweepPaths
from launch.contract.plan import Plan
from launch.contract.records.events import Phase
from launch.contract.records.identity import identity_of
from launch.contract.records.step_metrics import StepMetrics
from orchestrator.sweeps.store import order_lock, report_disk_errors, write_plan


def write_logged_runs(sweep: SweepPaths, plan: Plan, files: CurveFiles, first: int) -> None:
    """Write ``plan`` and a completed attempt of each of its runs, in the order of ``files``. Keep existing attempts.

    Args:
        first: the index of the first compared step.

    Raises:
        CurveError: steps are not evenly spaced.
        SystemFault: the store cannot be written to.
    """
    with report_disk_errors(sweep):
        sweep.root.mkdir(parents=True, exist_ok=True)
    with order_lock(sweep):
        write_plan(sweep, plan)
        for cell, side in zip(plan.cells, (files.eager, files.graphed), strict=True):
            for run_id, (name, curve) in zip(cell.run_ids, side.items(), strict=True):
                attempt = sweep.run(run_id).attempt(1)
                if not attempt.has_ended:
                    _write_attempt(attempt, cell.graphed, first, name, curve, files)


def _write_attempt(
    attempt: AttemptPaths, graphed: bool, first: int, name: str, curve: Curve, files: CurveFiles
) -> None:
    numbers = np.searchsorted(files.steps, curve.steps.step)
    attempt.metrics.unlink(missing_ok=True)
    attempt.events(0).unlink(missing_ok=True)
    with JsonLines(attempt.metrics) as lines:
        for number, loss, norm in zip(numbers.tolist(), curve.steps.loss, curve.steps.grad_norm, strict=True):
            lines.write(StepMetrics(number, float(loss), float(norm), 0.0, 0, _phase(number - first, graphed)))
    steps = curve.steps.step
    note = f"read from {redact(name)}: {', '.join(curve.columns)} of steps {steps[0]} to {steps[-1]}, which count from 0 here"
    with JsonLines(attempt.events(0)) as events:
        at = {"time": 0.0, "phase": "init", "step": None}
        events.write({**at, "kind": "enter", "pid": redact(name), **identity_of(attempt)})
        events.write({**at, "kind": "note", "message": note})
    said = {"made": "elsewhere", "metrics": list(curve.units), "settings": dict(curve.settings)}
    write_json(attempt.environment, identity_of(attempt) | said)
    # The sides share no allocation, so no speed is judged.
    outcome = Outcome("COMPLETED", "teardown", f"log {redact(name)}", 0.0, 0.0)
    write_json(attempt.outcome, outcome_to_json(attempt, outcome))


def _phase(since: int, graphed: bool) -> Phase:
    """Return the phase of the step that is ``since`` steps after the first compared step."""
    if since >= 0:
        return "measure"
    return "capture" if graphed and since == -1 else "warmup"
