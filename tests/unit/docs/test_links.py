"""Test that links between pages lead to a file and a heading, and that docs/seeds.md names existing rules, classes and
tests."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from launch.failures.classes import FAILURE_CLASSES
from launch.support import SUPPORT
from orchestrator.rules import RULES

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the headings of a page as GitHub spells them in links."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if "://" not in link and (not target.exists() or (heading and heading not in anchors(target))):
            broken.append(link)
    assert not broken


def rows_of_seeds() -> list[list[str]]:
    """Return the cells of the rows of docs/seeds.md that have a state."""
    lines = (ROOT / "docs" / "seeds.md").read_text().partition("\n## ")[2].splitlines()
    tables = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in tables if row[0] not in ("---", "it says", "it has", "error")]


def test_every_row_of_the_seeds_has_a_state_and_a_place() -> None:
    rows = rows_of_seeds()
    assert len(rows) > 80
    for row in rows:
        assert len(row) == 3 and re.match(r"(done|partly|not yet|out of scope)\b", row[1]), row
        assert LINK.search(row[2]), row
        assert row[1].startswith(("done", "out")) or "missing" in row[1].lower() or "not run" in row[1], (
            f"what is missing? {row}"
        )


def test_the_seeds_name_rules_classes_and_files_that_exist() -> None:
    text = (ROOT / "docs" / "seeds.md").read_text()
    rules = {rule.id for rule in (*RULES, *(rule for table in SUPPORT.values() for rule in table))}
    named = re.findall(r"`((?:capture|scope|overlap|megatron|torch_native|training|command|layout)\.[a-z_0-9]+)`", text)
    fields = {"training.variable_sequence_lengths", "training.cpu_offloading"}
    assert set(named) - fields <= rules
    states = [row[1] for row in rows_of_seeds()]
    classes = {name for state in states for name in re.findall(r"\b[A-Z]+_[A-Z_]+\b", state)}
    assert classes - {"NCCL_GRAPH_REGISTER"} <= {row.name for row in FAILURE_CLASSES} | {"CAPTURE_FAILED"}
    paths = re.findall(r"\b((?:tests|recipes|launch|orchestrator)/[\w/]+\.(?:py|yaml))", text)
    assert paths and all((ROOT / path).exists() for path in paths)
