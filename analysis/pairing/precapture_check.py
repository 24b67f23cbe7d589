"""Check the steps before the capture. A graphed run is eager there, so graphs cannot cause a difference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from analysis.records.run import Attempt
from analysis.records.steps import Steps
from analysis.verdict.completeness import Curves, describe_disagreement
from analysis.verdict.judge_curves import first_compared
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins
from launch.contract.spec import RunSpec

UNLIKE = 10.0
"""Losses of the first step that are this many margins apart are not those of equal weights and data."""
START_ALIKE = "let all runs start alike: seed weights and data, and write checkpoints below {output}, a folder that is new for each run"


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
        # The observer digests the state before this step. It does not if the program captures later.
        checked = (after == "check") & (graphed.step[at + 1 :] == spec.middle)
    else:
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


def check_numbers(eager: Attempt, graphed: Attempt, margins: Margins) -> Verdict | None:
    """Return INCOMPARABLE if a user's program begins both runs with other losses and other numbers of its steps."""
    before, after = (attempt.environment.get("choices", {}).get("first_number") for attempt in (eager, graphed))
    if before is None or after is None or before == after:
        return None
    if not (losses := unlike_losses(eager, graphed, margins)):
        return None
    reason = f"a run resumed a checkpoint: the program numbers its first step {before} (eager) and {after} (graphed), and {losses}"
    return Verdict("INCOMPARABLE", reason, START_ALIKE)


def unlike_losses(eager: Attempt, graphed: Attempt, margins: Margins) -> str:
    """Name the losses of the first step if they differ by more than the margin; return "" if they do not."""
    return _unlike_losses({"the eager run": eager.steps, "the graphed run": graphed.steps}, margins, 1.0)


def describe_unlike_start(runs: Curves, margins: Margins) -> str:
    """Say that runs of a user's program begin with other losses before anything is captured; return "" if they do not."""
    eager = {name: steps for name, steps in runs.items() if len(steps) and steps.phase[0] == "warmup"}
    losses = _unlike_losses(eager, margins, UNLIKE)
    return f"the runs do not start alike: before any capture, {losses}" if losses else ""


def _unlike_losses(runs: Curves, margins: Margins, at_least: float) -> str:
    """Name losses of the first step that are more than ``at_least`` margins apart; return "" if none are."""
    losses = {name: float(steps.loss[0]) for name, steps in runs.items() if len(steps)}
    if len(losses) < 2:
        return ""
    low, high = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
    if not at_least * max(margins.loss, Margins.loss) < losses[high] - losses[low] < math.inf:
        return ""
    return f"the loss of the first step is {losses[high]:.6g} in {high} and {losses[low]:.6g} in {low}"


def check_between_captures(
    eager: Sequence[Steps], graphed: Steps, spec: RunSpec, margins: Margins, *, equal: bool
) -> Verdict | None:
    """Return INCONCLUSIVE if a user's program differs from ``eager`` runs between its captures. It takes the place of a pass.

    ``equal`` is whether the runs are equal bit for bit after the last capture.
    """
    captures = range(first_capture(graphed, spec), capture_step(graphed, spec))
    found = describe_disagreement(eager, [graphed], captures, margins, equal=equal)
    if not found:
        return None
    reason = (
        f"the graphed run captures in several steps, up to step {graphed.step[captures.stop]}, and differs from the eager runs between "
        f"them: {found}, where graphs that were captured earlier may be replayed"
    )
    return Verdict("INCONCLUSIVE", reason, "capture everything in one step, so that all replays are compared")


def first_capture(graphed: Steps, spec: RunSpec) -> int:
    """Return the step up to which the graphed run is eager: the first capture of a user's program, which may capture in several."""
    captured = capture_step(graphed, spec)
    return captured if spec.engine != "command" else int(np.argmax(graphed.phase == "capture"))


def capture_step(graphed: Steps, spec: RunSpec) -> int:
    """Return the last step before the comparison: the capture step of ``spec``, or of a user's program its last capture."""
    if spec.engine != "command":
        return spec.cuda_graph.capture_step
    return (first_compared(graphed.phase) or 1) - 1
