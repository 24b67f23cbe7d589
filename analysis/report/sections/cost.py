"""The cost of the sweep: the time of its runs on all ranks, and the phases that took it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from analysis.records.run import attempts_of
from analysis.report.report_data import ReportData
from analysis.report.sections.tables import table
from analysis.sweep.cell_results import CellResult
from launch.common.grouped import grouped
from launch.contract.outcomes import Outcome
from launch.contract.records.events import PHASES

SHORTEST_WAIT = 0.05
"""Seconds between attempts that round to a tenth."""
CHECKS = "Step checks run between steps, and no phase includes them. "


def render(report: ReportData) -> list[str]:
    sides = [[result for result in report.ran if result.cell.graphed == graphed] for graphed in (False, True)]
    if not (total := sum(map(_hours, sides))):
        return []
    unit = "GPU hours" if any(result.on_gpu for result in report.ran) else "hours of CPU ranks"
    eager, graphed = (f"{_hours(side):.3g}" for side in sides)
    found = [phase for phase in PHASES if any(phase in result.phase_seconds for result in report.ran)]
    rows = [[phase, *(f"{_seconds(side, phase):.1f} s" for side in sides)] for phase in found]
    has_checks = any(map(_check_seconds, sides))
    if has_checks:
        rows += [["step checks", *(f"{_check_seconds(side):.1f} s" for side in sides)]]
    rows += [["start and end", *(f"{_outside_phases(side):.1f} s" for side in sides)]]
    return [
        "## What this cost",
        f"The attempts that count took {total:.3g} {unit}: {eager} eager, {graphed} graphed.{_lost(report.ran, unit)}",
        "The table adds up the time of rank 0 over all runs. Probe: the profiled steps after the timed ones. "
        f"{CHECKS * has_checks}Start and end: the time of an attempt before and after its phases.{_waited(report.ran)}",
        table(("phase", "eager runs", "graphed runs"), rows),
    ]


def _hours(results: Sequence[CellResult]) -> float:
    return sum(result.seconds * result.spec.parallelism.world_size for result in results) / 3600


def _seconds(results: Sequence[CellResult], phase: str) -> float:
    return sum(seconds for result in results for name, seconds in result.phase_seconds.items() if name == phase)


def _check_seconds(results: Sequence[CellResult]) -> float:
    """Return the seconds of step checks, which run between steps and outside of the phases' time."""
    return sum(checks.total_seconds for result in results if (checks := result.graphs.step_checks))


def _outside_phases(results: Sequence[CellResult]) -> float:
    in_phases = sum(sum(result.phase_seconds.values()) for result in results)
    return max(0.0, sum(result.seconds for result in results) - in_phases - _check_seconds(results))


def _lost(results: Sequence[CellResult], unit: str) -> str:
    hours = sum(_length(_other_outcomes(result)) * result.spec.parallelism.world_size for result in results) / 3600
    return f" Other attempts took {hours:.3g} {unit}." if hours else ""


def _waited(results: Sequence[CellResult]) -> str:
    seconds = _between_attempts(results)
    return f" {seconds:.1f} s passed between the attempts of bundles." if seconds >= SHORTEST_WAIT else ""


def _between_attempts(results: Sequence[CellResult]) -> float:
    """Return the seconds without an attempt, between the first and the last attempt of each allocation, over all of them."""
    outcomes = (
        outcome
        for result in results
        for outcome in (*(attempt.outcome for attempt in attempts_of(result.runs)), *_other_outcomes(result))
    )
    return sum(
        max(0.0, max(one.ended for one in found) - min(one.started for one in found) - _length(found))
        for found in grouped((outcome.allocation, outcome) for outcome in outcomes).values()
    )


def _other_outcomes(result: CellResult) -> list[Outcome]:
    return [one.outcome for run in result.runs for one in run.partial if one.outcome]


def _length(outcomes: Iterable[Outcome]) -> float:
    return sum(max(0.0, outcome.ended - outcome.started) for outcome in outcomes)
