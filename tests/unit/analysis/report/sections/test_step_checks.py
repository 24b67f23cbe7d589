"""Test the table of step checks."""

from __future__ import annotations

from dataclasses import replace

from analysis.pairing.step_checks import StepChecks
from analysis.report.sections.step_checks import _row
from tests.unit.analysis.report.test_headline import cell


def test_checks_that_compared_nothing_claim_no_difference_of_0() -> None:
    result = cell("torch", "BITWISE")
    none = StepChecks((4, 75), 3, 0, 0, 0.0, 0, 0.0, undecided="not step-checked")
    some = replace(none, tensors=40, seconds=1.0, undecided="")
    rows = [_row(replace(result, name="A1", graphs=replace(result.graphs, step_checks=each))) for each in (none, some)]
    assert rows[0] == ["A1", "4, 75", "3", "0", "-", "-", "-", "-", "not step-checked"]
    assert rows[1] == ["A1", "4, 75", "3", "40", "0", "0", "0", "1.0 s", "none beyond noise"]
