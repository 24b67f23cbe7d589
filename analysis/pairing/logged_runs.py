"""Judge runs that were made elsewhere by the numbers in their logs, with the rules for curves in files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from analysis.curves.curve import Curve, curve_of_record
from analysis.curves.curve_files import CurveFiles
from analysis.curves.judge_files import judge_files
from analysis.pairing.eager_baseline import EagerBaseline
from analysis.pairing.pair import Pair
from analysis.pairing.program_settings import is_allowed, refuse
from analysis.records.provenance import flat
from analysis.records.run import Run
from analysis.verdict.rounding import not_of_bits
from analysis.verdict.verdict import Verdict, worst
from launch.contract.plan import Margins
from launch.contract.records.step_metrics import METRICS

UNCHECKED = (
    "read from logs: replay is unproven, and nothing shows that the runs share workload, data, code and libraries"
)


def judge_logs(
    pairs: Sequence[Pair], baseline: EagerBaseline, margins: Margins
) -> tuple[tuple[Verdict, ...], Verdict | None]:
    """Return the verdict on all runs together, for each pair and for the cell. One damaged record decides for all."""
    if damaged := [pair.exact for pair in pairs if pair.exact]:
        return tuple(pair.exact or worst(damaged) for pair in pairs), worst(damaged)
    named = _name(baseline.runs, "eager") | _name([pair.graphed for pair in pairs], "graphed")
    if contradicting := _contradictions(named, margins):
        return tuple(contradicting for _ in pairs), contradicting
    eager, graphed = (
        {name: _curve(run) for name, run in named.items() if name.startswith(side)} for side in ("eager", "graphed")
    )
    metrics = (
        METRICS if all("grad_norm" in curve.units for curve in (*eager.values(), *graphed.values())) else METRICS[:1]
    )
    captured = max(pair.first_compared for pair in pairs) - 1
    files = CurveFiles(eager, graphed, {}, metrics)
    judged = not_of_bits(judge_files(files, captured if captured >= 0 else None, margins))
    copies = [
        (f"{copy} has the same numbers as {original}, so it may be a copied log", copy in graphed and original in eager)
        for copy, original in files.copies.items()
    ]
    reason = "; ".join(filter(None, (judged.reason, *(text for text, _ in copies), UNCHECKED)))
    verdict = replace(judged, reason=reason, copied_logs=tuple(text for text, crosses in copies if crosses))
    return tuple(verdict for _ in pairs), verdict


def _name(runs: Iterable[Run], side: str) -> dict[str, Run]:
    return {f"{side} repeat {run.repeat}": run for run in runs if run.attempt and not run.attempt.problems}


def _contradictions(runs: Mapping[str, Run], margins: Margins) -> Verdict | None:
    """Return INCOMPARABLE if two logs contradict each other in a setting that both name."""
    said = {name: flat(run.attempt.environment["settings"], "settings.") for name, run in runs.items() if run.attempt}
    for (one, before), (other, after) in combinations(said.items(), 2):
        both = sorted(before.keys() & after.keys())
        unlike = [f"{key}: {before[key]} ({one}), {after[key]} ({other})" for key in both if before[key] != after[key]]
        if unlike := [text for text in unlike if not is_allowed(text, margins)]:
            return refuse(unlike)
    return None


def _curve(run: Run) -> Curve:
    assert run.attempt is not None, "a log is read before its run exists"
    # A missing column is read as NaN, like a NaN that the program computed.
    known = [metric for metric in METRICS if metric in run.attempt.environment["metrics"]]
    return curve_of_record(run.attempt.steps, known)
