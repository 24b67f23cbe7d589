"""The steps before a capture: a graphed run is eager there, so that what it does there is evidence of something else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.records.steps import Steps
from analysis.verdict.curve_difference import METRIC_NAMES, METRICS, measure_differences, noise_floor
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins

SURE = 3
"""How many times eager's own noise a difference has to be, beyond the margin, before it is none."""


def check_capture_step(graphed: Steps, capture_step: int) -> Verdict | None:
    """Said where the one capture of ``graphed`` is not where its spec has it: a window could begin wherever a record says
    otherwise, and what the run computed before it would be judged by nobody.

    All engines capture in the step that launch.contract.spec.CudaGraph.capture_step names, whatever a capture is.
    """
    at = int(np.argmax(graphed.phase == "capture"))
    before, after = graphed.phase[:at], graphed.phase[at + 1 :]
    if not ((before == "warmup").all() and np.isin(after, ("settle", "measure")).all()):
        reason = "the graphed run's phases are out of order: warm-up, one capture, then steps that replay"
        return Verdict("INCOMPARABLE", reason, "run the pair again: its records are damaged")
    found = int(graphed.step[at])
    if found == capture_step:
        return None
    reason = (
        f"the graphed run captured in step {found}, and its spec asks for step {capture_step} (cuda_graph): "
        "records are damaged, or the engine captured at another time"
    )
    return Verdict("INCOMPARABLE", reason, "run the pair again")


def check_agreement(
    eager: Sequence[Steps], graphed: Steps, capture_step: int, margins: Margins, equal: bool
) -> Verdict | None:
    """Said where ``graphed`` is beyond the margin of the ``eager`` runs before its capture, and their own noise does not
    explain it. ``equal`` is whether it is equal to the bit after it: there is no such noise then."""
    if capture_step == 0:
        return None
    window = slice(0, capture_step)
    floor = noise_floor(eager, window)
    if floor is None and not equal:
        return None
    found = measure_differences(eager, [graphed], window).evidence
    for metric in METRICS:
        size, step = found.largest(metric)
        noise = floor.of(metric) if floor else 0.0
        if not size <= margins.of(metric) + SURE * noise:
            reason = (
                f"the graphed run parts from the eager ones before its capture: the {METRIC_NAMES[metric]} differs by "
                f"{size:.3g} at step {step}, where both are eager, so that graphs are not what it is about"
            )
            return Verdict("INCOMPARABLE", reason, "see that both began with the same weights, data and settings")
    return None
