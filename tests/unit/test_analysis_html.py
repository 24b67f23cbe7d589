"""report.html as text: the same bytes, nothing of a record taken for markup, and long curves thinned without hiding a step
that matters. How it looks and answers is tested in a browser (tests/browser/)."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.charts import MAXIMUM_POINTS, CurveChart, Line, thinned
from analysis.html import page
from analysis.markdown_blocks import plain, table

PICTURE = "plots/w-loss.png"


def chart(y: list[float], label: str = "eager") -> CurveChart:
    line = Line(label, 0, 0, *thinned(np.arange(len(y)), np.array(y)))
    return CurveChart("loss", (line,), (), None, None, 1e-3, len(y))


class Reader(HTMLParser):
    """Tags and text, as a browser would split them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json">(.*?)</script>', text)
    assert found
    return dict(json.loads(found[1]))


def test_a_picture_becomes_its_chart_and_no_other_image_is_asked_for() -> None:
    text = page(f"# T\n\n![Loss]({PICTURE})\n\n![else](http://example.com/x.png)\n", {PICTURE: chart([1.0, 2.0])})
    assert read(text).tags.count("figure") == 1 and "img" not in read(text).tags
    assert "example.com" not in text and "else" in read(text).text
    assert data_of(text)["lines"][0]["y"] == [1.0, 2.0]


def test_sections_can_be_jumped_to() -> None:
    text = page("# T\n\n## One & all\n\n### Not this\n\n## Two\n", {})
    assert '<nav><a href="#part0">One &amp; all</a> <a href="#part1">Two</a></nav>' in text
    assert '<h2 id="part1">Two</h2>' in text


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=40) | st.sampled_from(["</script><b>", "<!-- ", "]]>", "<svg onload=x>"]))
def test_no_text_opens_a_tag(text: str) -> None:
    markdown = f"# T\n\n{table(['a'], [[text]])}\n\n- {plain(text)}\n\n![Loss]({PICTURE})\n"
    plainly = page(f"# T\n\n{table(['a'], [['x']])}\n\n- x\n\n![Loss]({PICTURE})\n", {PICTURE: chart([1.0])})
    allowed = {
        *read(plainly).tags,
        "code",
        "em",
        "strong",
        "a",
        "br",
        "p",
        "ol",
        "ul",
        "li",
        "h1",
        "h2",
        "hr",
        "pre",
        "blockquote",
    }
    found = page(markdown, {PICTURE: chart([1.0], label=text)})
    assert set(read(found).tags) <= allowed
    assert data_of(found)["lines"][0]["label"] == text
    assert found == page(markdown, {PICTURE: chart([1.0], label=text)})


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9999), st.sampled_from([100.0, -100.0, float("nan"), float("inf")]))
def test_a_long_curve_keeps_the_step_that_stands_out(step: int, value: float) -> None:
    y = [float(np.sin(i)) for i in range(10_000)]
    y[step] = value
    found = data_of(page(f"![Loss]({PICTURE})\n", {PICTURE: chart(y)}))
    line = found["lines"][0]
    assert found["thinned"] == 10_000 and len(line["y"]) <= 1.6 * MAXIMUM_POINTS
    assert line["step"] == sorted(set(line["step"])) and (line["step"][0], line["step"][-1]) == (0, 9999)
    assert line["y"][line["step"].index(step)] == (value if np.isfinite(value) else None)


@pytest.mark.parametrize("text", ["a <b> c", "![x](y)", "<!--"])
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    assert "<" not in plain(text) and "![" not in plain(text)
    assert plain(f"`{text}`") == f"`{text}`", "backquotes show what they hold already"
