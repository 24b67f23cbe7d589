"""Failures of runs by kind."""

from __future__ import annotations

from analysis.report.report_data import ReportData
from analysis.report.sections.tables import table
from analysis.sweep.failure_modes import FailureMode, failure_modes
from launch.common.text import first_names, one_line

LONGEST_MESSAGE = 240
HEADER = ("failure class", "ended", "cells", "eager baselines", "message", "fix")


def render(report: ReportData) -> list[str]:
    modes = failure_modes(report.sweep.results)
    return ["## Failure modes", table(HEADER, map(_row, modes))] if modes else []


def _row(mode: FailureMode) -> list[str]:
    message, labels = one_line(mode.message), (*mode.graphed, *mode.eager)
    return [
        mode.name,
        mode.ending,
        f"{len(labels)}: {first_names([f'`{label}`' for label in labels])}",
        _eager(mode),
        message if len(message) <= LONGEST_MESSAGE else message[:LONGEST_MESSAGE] + "...",
        mode.remedy,
    ]


def _eager(mode: FailureMode) -> str:
    if mode.eager:
        return f"{'fail in the same way' if mode.graphed else 'only these failed'}: graphs are not the cause"
    return "do not fail"
