"""Test that every time in milliseconds that the documentation quotes is in the report that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
QUOTING = ("determinism", "graphs", "megatron")
TIMES = re.compile(r"([\d.]+)(?: to ([\d.]+))? ms\b")
REPORT = re.compile(r"results/(\w+)/report\.md")


def quoting(text: str) -> list[str]:
    """Return the paragraphs that quote a time, each on a line. A table belongs to the paragraph above it."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.replace("\n\n|", "\n|").split("\n\n"))
    return [paragraph for paragraph in paragraphs if TIMES.search(paragraph)]


def stands_in(figure: str, report: str) -> bool:
    """Return whether the report holds the figure, rounded as quoted."""
    digits = len(figure.partition(".")[2])
    return any(f"{float(found):.{digits}f}" == figure for found in re.findall(r"\d+\.\d+", report))


@pytest.mark.parametrize("name", QUOTING)
def test_quoted_times_stand_in_the_report_that_is_named(name: str) -> None:
    paragraphs = quoting((DOCS / f"{name}.md").read_text())
    assert paragraphs
    for paragraph in paragraphs:
        reports = "".join((DOCS / "results" / found / "report.md").read_text() for found in REPORT.findall(paragraph))
        figures = [figure for pair in TIMES.findall(paragraph) for figure in pair if figure]
        assert [figure for figure in figures if not stands_in(figure, reports)] == [], paragraph
