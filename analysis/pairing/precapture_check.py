"""Check the steps before the capture. A graphed run is eager there, so graphs cannot cause a difference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.records.steps import Steps
from analysis.verdict.curve_difference import METRIC_NAMES, METRICS
from analysis.verdict.curve_evidence import measure_differences
from analysis.verdict.divergence import SURE
from analysis.verdict.noise_floor import noise_floor
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins
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


def check_agreement(
    eager: Sequence[Steps], graphed: Steps, capture_step: int, margins: Margins, equal: bool
) -> Verdict | None:
    """Return INCOMPARABLE if ``graphed`` differs from the ``eager`` runs before its capture by more than margin and noise.

    ``equal`` is whether both are equal bit for bit after the capture. Then there is no noise.
    """
    if capture_step == 0:
        return None
    window = slice(0, capture_step)
    floor = noise_floor(eager, window)
    if floor is None and not equal:
        return None
    evidence = measure_differences(eager, [graphed], window).evidence
    for metric in METRICS:
        size, step = evidence.largest(metric)
        noise = floor.of(metric) if floor else 0.0
        if not size <= margins.of(metric) + SURE * noise:
            reason = (
                f"the graphed run differs from the eager runs before its capture: the {METRIC_NAMES[metric]} differs by "
                f"{size:.3g} at step {step}, where both run eagerly, so graphs are not the cause"
            )
            return Verdict("INCOMPARABLE", reason, "check that both started with the same weights, data and settings")
    return None
