"""Judge the curves of files. Their numbers may be copies, clipped, or printed with few digits."""

from __future__ import annotations

from dataclasses import replace

from analysis.curves.curve_files import CurveFiles, constant_norm
from analysis.records.steps import Integers
from analysis.verdict.amplified_rounding import may_be_amplified_rounding
from analysis.verdict.completeness import Curves, check_agreement
from analysis.verdict.constant_norm import SHOWS_NOTHING
from analysis.verdict.curve_difference import sample_of
from analysis.verdict.curve_tests.divergence import exceeds_margin_surely
from analysis.verdict.judge_curves import judge_curves
from analysis.verdict.noise import noise_along_steps
from analysis.verdict.rounding import judge_rounded
from analysis.verdict.shown_losses import check_shown_losses
from analysis.verdict.verdict import Verdict
from launch.contract.plan import Margins

_ANOTHER = "add an eager run with other numbers, or a perturbed one (--perturbed of analysis.loss)"
_SAME_ROUNDING = "compile the eager runs too if graphed ones are compiled, or lower the learning rate"
_LEAVE_OUT = "record the norm before it is clipped, with nine digits (%.9g), or leave the column out of all files"


def judge_files(files: CurveFiles, capture_step: int | None, margins: Margins) -> Verdict:
    """Judge ``files``, from the step after ``capture_step`` on.

    Raises:
        CurveError: steps are not evenly spaced.
    """
    steps = files.steps
    first = files.first_after(capture_step)
    verdict = _judge_printed(files, steps, first, margins)
    # A perturbed run with its own numbers shows the noise that equal eager runs do not show.
    if verdict.verdict in ("EQUIVALENT", "DIVERGED") and files.copies and files.perturbed.keys() <= files.copies.keys():
        verdict = _judge_without_copies(verdict, files, first, margins)
    if not verdict.passes and verdict.verdict != "INCOMPARABLE" and (shown := _shown_losses(files, first, margins)):
        return replace(shown, evidence=verdict.evidence)
    if verdict.passes and (unlike := _unlike_before(files, first, margins, verdict)):
        return unlike
    constant = constant_norm(files, first) if verdict.verdict not in ("DIVERGED", "INCOMPARABLE") else ""
    return (
        Verdict("INCOMPARABLE", f"{constant}: {SHOWS_NOTHING}", _LEAVE_OUT, verdict.evidence) if constant else verdict
    )


def _shown_losses(files: CurveFiles, first: int, margins: Margins) -> Verdict | None:
    """Return INCOMPARABLE if a graphed file shows losses of other steps."""
    eager, graphed = files.sides
    with_norms = "grad_norm" in files.metrics
    for name, steps in graphed.items():
        if shown := check_shown_losses(next(iter(eager.values())), steps, first, margins, with_norms=with_norms):
            return replace(shown, reason=f"{name}: {shown.reason}")
    return None


def _unlike_before(files: CurveFiles, first: int, margins: Margins, verdict: Verdict) -> Verdict | None:
    """Return INCOMPARABLE if curves differ before the capture. A late capture step would hide a fault there."""
    eager, graphed = (tuple(side.values()) for side in files.sides)
    before = max(first - 1, 0)  # without the capture step
    found = check_agreement(eager, graphed, before, margins, files.metrics, equal=verdict.verdict == "BITWISE")
    return replace(found, evidence=verdict.evidence) if found else None


def _judge_without_copies(verdict: Verdict, files: CurveFiles, first: int, margins: Margins) -> Verdict:
    """Return the verdict if equal curves count once. Keep a DIVERGED verdict that a second eager run would not change."""
    different = files.drop_copies()
    alone = _judge_printed(different, files.steps, first, margins)
    if alone.verdict != "INCONCLUSIVE":
        return alone
    if verdict.verdict == "DIVERGED" and _exceeds_own_noise(verdict, files, first, margins):
        return _unless_rounding(verdict, different, first)
    return replace(alone, fix=_ANOTHER, alternatives=()) if len(different.eager) == 1 else alone


def _unless_rounding(verdict: Verdict, different: CurveFiles, first: int) -> Verdict:
    """Return INCONCLUSIVE if rounding may have grown, because one eager run does not show how far it can."""
    (eager, *others), graphed = (tuple(different.sides[0].values()), different.sides[1])
    if others or not may_be_amplified_rounding(eager, graphed, different.units, first):
        return verdict
    reason = f"{verdict.reason}. The first difference is no larger than rounding, and training may have amplified it"
    return Verdict("INCONCLUSIVE", reason, _SAME_ROUNDING, verdict.evidence)


def _exceeds_own_noise(verdict: Verdict, files: CurveFiles, first: int, margins: Margins) -> bool:
    """Return whether graphed differences exceed a margin by more than their own noise.

    A second eager run would not differ as much.
    """
    eager, graphed = (list(side.values()) for side in files.sides)
    means = {tested.metric: tested.mean for tested in verdict.evidence.tested} if verdict.evidence else {}
    samples = (sample_of(metric, eager, graphed, slice(first, None)) for metric in files.metrics)
    return any(
        exceeds_margin_surely(one, margins.of(one.metric), noise_along_steps(one), means.get(one.metric)).any()
        for one in samples
    )


def _judge_printed(files: CurveFiles, steps: Integers, first: int, margins: Margins) -> Verdict:
    """Judge the curves, and consider the number of digits with which they are printed."""
    perturbed = next((curve.steps for curve in files.perturbed.values()), None)

    def judge(eager: Curves, graphed: Curves, margins: Margins) -> Verdict:
        return judge_curves(eager, graphed, steps, first, margins, files.metrics, perturbed)

    return judge_rounded(judge, *files.sides, files.units, first, margins)
