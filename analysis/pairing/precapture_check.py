"""Check the steps before the capture. A graphed run is eager there, so graphs cannot cause a difference."""

from __future__ import annotations

import numpy as np

from analysis.records.steps import Steps
from analysis.verdict.verdict import Verdict
from launch.contract.spec import RunSpec


def check_phases(graphed: Steps, spec: RunSpec) -> Verdict | None:
    """Return INCOMPARABLE unless ``graphed`` captured, and was checked, in the steps that ``spec`` gives.

    Without this check, a damaged record could move the start of the comparison and hide the steps before it. Our engines
    capture once, in launch.contract.spec.CudaGraph.capture_step. A user's program may capture at any time and in several steps.
    """
    asked = capture_step(graphed, spec)
    at = int(np.argmax(graphed.phase == "capture")) if spec.engine != "command" else asked
    before, after = graphed.phase[:at], graphed.phase[at + 1 :]
    if spec.engine == "command":
        before = before[~np.isin(before, ("capture", "settle"))]
    checked = np.isin(graphed.step[at + 1 :], spec.steps_after_checks)
    if not (
        (before == "warmup").all()
        and np.isin(after[~checked], ("settle", "measure")).all()
        and (after[checked] == "check").all()
    ):
        reason = "the graphed run's phases are out of order: warm-up, one capture, then steps that replay"
        return Verdict("INCOMPARABLE", reason, "run the pair again, since its records are damaged")
    step = int(graphed.step[at])
    if step == asked:
        return None
    reason = (
        f"the graphed run captured in step {step}, but its spec asks for step {spec.cuda_graph.capture_step} (cuda_graph): "
        "its records are damaged, or its engine captured at the wrong time"
    )
    return Verdict("INCOMPARABLE", reason, "run the pair again")


def capture_step(graphed: Steps, spec: RunSpec) -> int:
    """Return the last step before the comparison: the capture step of ``spec``, or of a user's program its last capture."""
    if spec.engine != "command":
        return spec.cuda_graph.capture_step
    captured = graphed.step[graphed.phase == "capture"]
    return int(captured[-1]) if len(captured) else 0
