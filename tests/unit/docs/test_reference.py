"""Test that the tables of the reference agree with the code, from which docs/reference.py writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import reference
from launch.contract.exit_codes import LOSS, exit_codes_of
from orchestrator.cli.verbs import VERBS

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_has_the_tables_that_the_code_says(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text()
    assert page == reference.with_tables(page), "run: python -m docs.reference"


def test_every_table_stands_in_one_page() -> None:
    pages = "".join((DOCS / f"{name}.md").read_text() for name in reference.PAGES)
    assert sorted(found[2] for found in reference.BLOCK.finditer(pages)) == sorted(reference.BLOCKS)


def test_a_field_without_a_meaning_is_refused() -> None:
    page = (DOCS / "recipes.md").read_text().replace("| `seed` |", "| `other` |")
    with pytest.raises(SystemExit, match="the meaning of seed"):
        reference.with_tables(page)


def test_every_command_has_the_exit_codes_of_all() -> None:
    assert all({0, 1, 2, 130, 141} <= exit_codes_of(command).keys() for command in [*VERBS, LOSS])
