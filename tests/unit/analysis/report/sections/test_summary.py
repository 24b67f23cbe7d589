"""Test that the first screen of a report explains its short names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.report.sections import summary
from analysis.sweep.cell_results import CellResult
from tests.unit.analysis.report.test_headline import cell, speed


def named(name: str, label: str, workload: str, *, eager: bool = False) -> CellResult:
    result = cell("none" if eager else "torch")
    return replace(result, name=name, cell=replace(result.cell, label=label, workload_id=workload))


def test_the_legend_names_cells_once_and_what_they_share_once(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = {"a": named("A0", "eager, ep=4", "a", eager=True), "b": named("B0", "eager", "b", eager=True)}
    one, two = named("A1", "torch.attn, ep=4", "a"), named("A2", "torch, ep=4", "a")
    other, alone = named("B1", "local|mine", "b"), named("C1", "torch, dp=2", "c")
    assert summary.legend([one, two], eager) == "A1 `torch.attn`, A2 `torch`, both with ep=4."
    assert summary.legend([two, other, alone], eager) == "A2 `torch`, with ep=4; B1 `local|mine`; C1 `torch, dp=2`."
    monkeypatch.setattr(summary, "MOST_NAMED", 1)
    assert summary.legend([two, other], eager) == "A2 `torch`, with ep=4; section Cells names the others."


def test_the_speed_of_a_cell_that_does_not_pass_is_shown_without_a_verdict() -> None:
    sound, unsure = (cell("torch", word, speed("FASTER")) for word in ("BITWISE", "INCONCLUSIVE"))
    assert summary._speedup(sound) == "1.33x (1.11 to 1.58) FASTER"
    assert summary._speedup(unsure) == "1.33x (1.11 to 1.58), no verdict"
