"""The report as one HTML file: the markdown's text with its pictures as charts that answer to the pointer.

It is rendered from the markdown itself, so that the two say the same. It asks no network for anything, and its policy
(Content-Security-Policy) lets a browser run its own script and nothing else, whatever a record holds.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from analysis.report.charts import MAXIMUM_POINTS, Chart, CurveChart, Line, TimeChart
from launch.common.atomic_files import dumps

AXES = {
    "loss": ("loss, nats a token", "|difference|, nats"),
    "grad_norm": ("gradient norm", "|difference| / eager"),
}
_ASSETS = Path(__file__).parent


def page(markdown: str, charts: Mapping[str, Chart]) -> str:
    """The whole file; ``charts`` are by the image that stands for each in ``markdown``. An image that is none of them is
    shown as its text, since showing it would ask for it."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    reader.renderer = _Renderer(charts)
    tokens = reader.parse(markdown)
    title = next((token.content for token in tokens if token.type == "inline"), "Validation report")
    script, style = ((_ASSETS / f"page.{kind}").read_text() for kind in ("js", "css"))
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            _contents(tokens),
            reader.renderer.render(tokens, reader.options, {}),
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        )
    )


def _contents(tokens: Sequence[Token]) -> str:
    """Links to the sections, which are given the names to link to."""
    links: list[str] = []
    for place, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.attrSet("id", f"part{len(links)}")
            links.append(f'<a href="#part{len(links)}">{html.escape(tokens[place + 1].content)}</a>')
    return f"<nav>{' '.join(links)}</nav>"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class _Renderer(RendererHTML):
    """Charts in the place of images, and tables that scroll by themselves."""

    def __init__(self, charts: Mapping[str, Chart]) -> None:
        super().__init__()
        self._charts = charts

    def image(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        token = tokens[index]
        title = html.escape(token.content)
        chart = self._charts.get(str(token.attrs.get("src", "")))
        if chart is None:
            return title
        return (
            f'<figure><figcaption>{title}</figcaption><script type="application/json">{_data(chart)}</script></figure>'
        )

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


# --- data -----------------------------------------------------------------------------------------------------------


def _data(chart: Chart) -> str:
    """JSON that cannot end the element it stands in."""
    return dumps(_content(chart)).replace("<", "\\u003c")


def _content(chart: Chart) -> dict[str, Any]:
    if isinstance(chart, CurveChart):
        own, beside = AXES[chart.metric]
        return {
            "kind": "curves",
            "own": own,
            "beside": beside,
            "margin": chart.margin,
            "capture": chart.capture,
            "thinned": chart.steps if chart.steps > MAXIMUM_POINTS else None,
            "lines": [_line(line) for line in chart.curves],
            "differences": [_line(line) for line in chart.differences],
            "floor": chart.floor and _line(chart.floor),
        }
    if isinstance(chart, TimeChart):
        boxes = [{**vars(box), "percentiles": [_short(value) for value in box.percentiles]} for box in chart.boxes]
        return {"kind": "times", "unit": chart.unit, "boxes": boxes}
    bars = [{**vars(bar), "heights": [None if h is None else _short(h) for h in bar.heights]} for bar in chart.bars]
    return {"kind": "memory", "words": chart.words, "phases": chart.phases, "bars": bars}


def _line(line: Line) -> dict[str, Any]:
    y = [_short(value) if math.isfinite(value) else None for value in line.y.tolist()]
    return {"label": line.label, "colour": line.colour, "repeat": line.repeat, "step": line.step.tolist(), "y": y}


def _short(value: float) -> float:
    """Nine digits are what a float32 has."""
    return float(f"{value:.9g}")
