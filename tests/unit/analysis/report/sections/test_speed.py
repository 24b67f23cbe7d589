"""Test what section Speed says of single cells."""

from __future__ import annotations

from dataclasses import replace

from analysis.report.sections.speed import _remarks_on
from tests.unit.analysis.report.test_headline import cell, speed


def test_a_doubtful_speed_is_named_beside_losses_that_do_not_decide_either() -> None:
    doubtful = replace(speed("INCONCLUSIVE"), reason="it changes")
    said = [list(_remarks_on(cell("torch", word, doubtful))) for word in ("BITWISE", "INCONCLUSIVE", "DIVERGED")]
    unsure = "if its losses passed, its speed-up would be INCONCLUSIVE, because it changes."
    assert said == [["INCONCLUSIVE, because it changes."], [unsure], []]
