"""Test that the gallery of failures has every fault, and that the page says how each ends."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from launch.contract.spec import FaultKind
from launch.train.fault_injection import KINDS
from orchestrator.errors import InputError
from orchestrator.recipe.expand import ResolvedCell, expand
from orchestrator.recipe.recipe import load
from tests.gallery import CLASS_OF

ROOT = Path(__file__).parents[3]
GALLERY = ROOT / "recipes" / "failure_gallery.yaml"
FAULTS = [kind for kind in get_args(FaultKind) if kind != "none"]


@pytest.fixture(scope="module")
def cells() -> list[ResolvedCell]:
    return [cell for cell in expand(load(GALLERY), "cuda") if not cell.is_added_baseline]


def test_every_fault_can_be_provoked_and_is_in_the_gallery(cells: list[ResolvedCell]) -> None:
    assert list(KINDS) == list(CLASS_OF) == FAULTS
    assert {cell.spec.fault.kind for cell in cells} == set(get_args(FaultKind))


def test_the_page_says_how_each_fault_of_the_gallery_ends(cells: list[ResolvedCell]) -> None:
    table = (ROOT / "docs" / "failures.md").read_text().split("## On purpose")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    found = {kind.strip("`"): (ends, name.strip("`")) for kind, _, ends, name in rows}
    expected = {
        kind: (
            " in ".join(filter(None, (cell.expect.outcome, cell.expect.phase))),
            CLASS_OF[kind] or "none: the verdict is DIVERGED",
        )
        for cell in cells
        if (kind := cell.spec.fault.kind) != "none"
    }
    assert found == expected


def test_a_fault_that_nobody_knows_is_refused_with_what_was_meant() -> None:
    with pytest.raises(InputError, match=r"(?s)fault\.kind.*oom_eagerly.*did you mean 'oom_eager'"):
        load(GALLERY, ["sweep=null", "fault.kind=oom_eagerly"])
