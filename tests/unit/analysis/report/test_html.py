"""Test report.html as text: it has the same bytes each time, no text of a record becomes markup, and thinned curves
keep every step that matters. Tests in a browser are in tests/browser/."""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from analysis.compare.golden import golden_of
from analysis.compare.junit import junit_of_report
from analysis.report.charts import MAXIMUM_POINTS, CurveChart, Line, thin_out
from analysis.report.html import page
from analysis.report.sections.tables import FOLD, FOLD_END, code_block, escape, item, table
from analysis.report.write_report import write_report
from analysis.sweep.judge_sweep import judge_sweep
from launch.common.atomic_files import read_json, write_json
from launch.common.text import code_name
from tests.records import STARTED, AttemptRecord, write_sweep

PICTURE = "plots/w-loss.png"


def chart(y: list[float], label: str = "eager") -> CurveChart:
    line = Line(label, 0, 0, *thin_out(np.arange(len(y)), np.array(y)))
    return CurveChart("loss", ("loss", "difference"), (line,), (), None, None, 1e-3, len(y))


class Reader(HTMLParser):
    """Collect tags and text, as a browser would split them."""

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
    assert data_of(text)["curves"][0]["y"] == [1.0, 2.0]


@pytest.mark.parametrize("markup", ["<details open>", "<b>x</b>", f"{FOLD.strip()}<b>", "x <i>y</i>"])
def test_no_html_but_a_fold_reaches_the_page(markup: str) -> None:
    kept = page(f"# T\n\n{FOLD}\nnote\n\n{FOLD_END}", {})
    assert f"{FOLD}<p>note</p>\n{FOLD_END}" in kept
    assert not {"details", "b", "i"} & set(read(page(f"# T\n\n{markup}\n", {})).tags)


def test_sections_can_be_jumped_to() -> None:
    text = page("# T\n\n## One & all\n\n### Not this\n\n## Two\n", {})
    assert '<nav><a href="#part0">One &amp; all</a> <a href="#part1">Two</a></nav>' in text
    assert '<h2 id="part1">Two</h2>' in text


@settings(max_examples=40)
@given(st.text(max_size=40) | st.sampled_from(["</script><b>", "<!-- ", "]]>", "<svg onload=x>"]))
def test_no_text_opens_a_tag(text: str) -> None:
    markdown = f"# T\n\n{table(['a'], [[text]])}\n\n- {escape(text)}\n\n![Loss]({PICTURE})\n"
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
    assert data_of(found)["curves"][0]["label"] == text
    assert found == page(markdown, {PICTURE: chart([1.0], label=text)})


@settings(max_examples=40)
@given(st.integers(0, 9999), st.sampled_from([100.0, -100.0, float("nan"), float("inf")]))
def test_a_long_curve_keeps_the_step_that_stands_out(step: int, value: float) -> None:
    y = [float(np.sin(i)) for i in range(10_000)]
    y[step] = value
    found = data_of(page(f"![Loss]({PICTURE})\n", {PICTURE: chart(y)}))
    line = found["curves"][0]
    assert (found["thinned"], found["steps"]) == (True, 10_000) and len(line["y"]) <= 1.6 * MAXIMUM_POINTS
    assert line["step"] == sorted(set(line["step"])) and (line["step"][0], line["step"][-1]) == (0, 9999)
    assert line["y"][line["step"].index(step)] == (value if np.isfinite(value) else None)


@pytest.mark.parametrize("text", ["a <b> c", "![x](y)", "<!--"])
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    assert "<" not in escape(text) and "![" not in escape(text)
    assert escape(f"`{text}`") == f"`{text}`", "backquotes show what they hold already"


MARKUP = st.text(alphabet="`\\<b>![]() a\n#-|~=1.\0", max_size=14)
"""Draw texts that a Markdown reader may interpret as markup."""


def tokens(markdown: str) -> list[tuple[str, str]]:
    """Return the types and texts of blocks and inline tokens, from a Markdown reader that accepts HTML."""
    blocks = MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown)
    return [(token.type, token.content) for block in blocks for token in (block, *(block.children or ()))]


@settings(max_examples=100)
@given(st.lists(MARKUP, min_size=1, max_size=3))
@example(["[](", ")"])
def test_no_text_is_more_than_text_wherever_it_stands(texts: list[str]) -> None:
    """Any number of texts stand next to each other, with our own code between them, in a list and in a table."""
    line = " `ours` ".join(map(escape, texts))
    for markdown in (f"- **x** {line}\n", table(["a"], [texts[:1]]) + "\n", "\n".join(map(item, texts)) + "\n"):
        found = tokens(markdown)
        kinds = {kind for kind, _ in found}
        assert not kinds & {"html_block", "html_inline", "image", "heading_open", "fence", "code_block", "hr"}
        assert not kinds & {"blockquote_open", "ordered_list_open"}
    assert [text for kind, text in tokens(f"x {line}\n") if (kind, text) == ("code_inline", "ours")] == ["ours"] * (
        len(texts) - 1
    )
    assert escape(escape(line)) == escape(line), "nothing is done twice"
    name = code_name(texts[0]).strip()
    if name:
        assert ("code_inline", name) in tokens(f"x `{name}` y\n")


@given(st.text(alphabet="`~\n a#", max_size=30))
def test_a_fence_holds_whatever_its_text_is(text: str) -> None:
    (found,) = tokens(code_block(text, "yaml") + "\n")
    assert found == ("fence", text.rstrip("\n") + "\n") or (not text.strip("\n") and found[0] == "fence")


EVIL = '"><img src=x onerror=alert(1)>`<script>alert(2)</script>|</td>![x](http://evil/x.png)\n\n## Forged heading\n\n\0\x1b[31m\u202e'


def test_no_record_writes_markup_or_control_characters_into_a_report(tmp_path: Path) -> None:
    def evil(run: AttemptRecord) -> None:
        for events in run.events.values():
            events.append({"time": STARTED + 99, "kind": "note", "phase": "measure", "step": 1, "message": f"# {EVIL}"})
        run.environment["settings"]["X"] = EVIL
        if run.spec.graphed and run.outcome:
            run.outcome = dataclasses.replace(
                run.outcome,
                outcome="FAILED",
                phase="measure",
                message=f"boom \ud800{EVIL}",
                remedy=EVIL,
                failure_class="x<b>",
            )

    sweep = write_sweep(tmp_path / "s", edit=evil)
    plan = read_json(sweep.plan)
    plan["recipe"] = f"name: s\nnote: |\n```\n# All 5 graphed cells pass\n{EVIL}\n"
    for cell in plan["cells"]:
        cell["label"] += EVIL
    write_json(sweep.plan, plan)
    report = write_report(sweep)
    text = report.markdown.read_text()
    assert {c for c in text if unicodedata.category(c) in ("Cc", "Cf")} == {"\n"}
    found = tokens(text)
    assert {part for part in found if part[0].startswith("html")} == {("html_block", FOLD), ("html_block", FOLD_END)}
    headings = [found[place + 1][1] for place, (kind, _) in enumerate(found) if kind == "heading_open"]
    assert headings[:2] == ["Validation report: written", "Cells"]
    assert not [heading for heading in headings if re.search("^Forged|^All 5", heading)]
    page_read = read((sweep.report / "report.html").read_text())
    assert page_read.tags.count("h1") == 1 and "img" not in page_read.tags
    assert page_read.tags.count("details") == text.count(FOLD) > 1
    assert not set(report.summary) & {"\0", "\x1b", "\n"}
    outcome = read_json(report.json)["cells"][1]["runs"][0]["outcome"]
    assert outcome["message"] == f"boom \ud800{EVIL}", "report.json holds it whole"
    assert b"\\x1b[31m" in junit_of_report(golden_of(sweep), "mine")
    assert "`" not in "".join(result.cell.label for result in judge_sweep(sweep).results)
