"""The report as one HTML file: the Markdown text, with interactive charts instead of pictures.

It is rendered from the Markdown, so both have the same content. It loads nothing from the network. Its Content-Security-Policy
lets a browser run only the page's own script, whatever a record contains.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from analysis.report.charts import Chart, CurveChart, MemoryChart, SpeedChart, TimeChart
from analysis.report.sections.tables import FOLD, FOLD_END
from launch.common.atomic_files import dumps

_ASSETS = Path(__file__).parent


def page(markdown: str, charts: Mapping[str, Chart]) -> str:
    """Return the whole file. The keys of ``charts`` are the images that they replace.

    Any other image appears as its text, because a browser would fetch an image.
    """
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    reader.renderer = _Renderer(charts)
    tokens = reader.parse(markdown)
    title = next((token.content for token in tokens if token.type == "inline"), "Validation report")
    template, script, style = ((_ASSETS / f"page.{kind}").read_text() for kind in ("html", "js", "css"))
    return Template(template).substitute(
        policy=f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'",
        title=html.escape(title),
        style=style,
        contents=_contents(tokens),
        body=reader.renderer.render(tokens, reader.options, {}),
        script=script,
    )


def _contents(tokens: Sequence[Token]) -> str:
    """Return links to the sections, and set the id of each section."""
    links: list[str] = []
    for place, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.attrSet("id", f"part{len(links)}")
            links.append(f'<a href="#part{len(links)}">{html.escape(tokens[place + 1].content)}</a>')
    return f"<nav>{' '.join(links)}</nav>"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class _Renderer(RendererHTML):
    """Render charts instead of images, and tables that scroll on their own. Escape all HTML except folds."""

    def __init__(self, charts: Mapping[str, Chart]) -> None:
        super().__init__()
        self._charts = charts

    def image(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        token = tokens[index]
        title = html.escape(token.content)
        chart = self._charts.get(str(token.attrs.get("src", "")))
        if chart is None:
            return title
        # This escape prevents a record from closing the script element.
        data = dumps(_data(chart)).replace("<", "\\u003c")
        return f'<figure><figcaption>{title}</figcaption><script type="application/json">{data}</script></figure>'

    def html_block(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        content = tokens[index].content
        return content if content in (FOLD, FOLD_END) else html.escape(content)

    def html_inline(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return html.escape(tokens[index].content)

    def paragraph_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return "" if self._is_chart(tokens[index + 1]) else str(self.renderToken(tokens, index, options, env))

    def paragraph_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return "\n" if self._is_chart(tokens[index - 1]) else str(self.renderToken(tokens, index, options, env))

    def table_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return '<div class="table"><table>'

    def table_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        return "</table></div>\n"

    def _is_chart(self, inline: Token) -> bool:
        return [child.attrs.get("src") in self._charts for child in inline.children or ()] == [True]


KINDS = {CurveChart: "curves", TimeChart: "times", MemoryChart: "memory", SpeedChart: "speeds"}


def _data(chart: Chart) -> dict[str, Any]:
    """Return the JSON content of ``chart`` that page.js draws."""
    thinned = isinstance(chart, CurveChart) and chart.thinned
    return {"kind": KINDS[type(chart)], "thinned": thinned, **_plain(chart)}


def _plain(value: Any) -> Any:
    """Return dataclasses, tuples and arrays as plain JSON values.

    Numbers are rounded to nine digits, enough for any float32. Numbers that are not finite become None.
    """
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if isinstance(value, (tuple, np.ndarray)):
        return [_plain(each) for each in (value.tolist() if isinstance(value, np.ndarray) else value)]
    return {name: _plain(each) for name, each in vars(value).items()} if is_dataclass(value) else value
