"""Markdown: tables, list items and code blocks that show any text literally, and differences as figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from launch.common.text import escape_invisible, one_line


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell_text(text) for text in line) + " |" for line in lines)


FOLD, FOLD_END = "<details><summary>How to read this</summary>\n", "</details>\n"
"""The only HTML in a report. Markdown parses each as a block of its own."""


def how_to_read(*notes: str) -> list[str]:
    """Return ``notes`` as a list in a fold that readers can open."""
    return [FOLD.strip(), "\n".join(f"- {note}" for note in notes), FOLD_END.strip()]


def cell_text(text: str) -> str:
    return escape(text).replace("|", "\\|") or "-"


def escape(text: str) -> str:
    """Return ``text`` on one line, escaped so that Markdown finds no HTML, image or unpaired backquote in it.

    Of links, only whole ones to a web page stay. Half of one would join with what follows ``text``.
    """
    line, at, parts = one_line(text), 0, []
    for kept in _KEPT.finditer(line):
        parts += [_escape_markup(line[at : kept.start()]), kept[0]]
        at = kept.end()
    rest = _escape_markup(line[at:])
    return "".join(parts) + rest + "\\" * rest.endswith("\\")


# Backslash escapes, code spans, whose text Markdown shows literally (CommonMark 0.31, 6.1), and links to a web page.
_KEPT = re.compile(r"\\[\\`]|(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)|(?<!!)\[[^]\[`<\\]*]\(https?://[^\s()<>`\\]+\)")


def _escape_markup(text: str) -> str:
    return text.replace("<", "&lt;").replace("![", "!\\[").replace("](", "]\\(").replace("`", "\\`")


def item(text: str) -> str:
    """Return ``text`` as a list item, with its first characters escaped if Markdown would interpret them."""
    return "- " + re.sub(r"^(\d*)([#>+*=~_|\-\[.)])", r"\1\\\2", escape(text))


def code_block(text: str, language: str) -> str:
    """Return ``text`` in a fence that none of its lines can close."""
    visible = escape_invisible(text.rstrip("\n"))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", visible)), default=0))
    return f"{fence}{language}\n{visible}\n{fence}"


def figure(value: float) -> str:
    """Return a difference in three digits, or "not finite"."""
    if not math.isfinite(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.2e}"


UNCHANGED = 0.01
"""Smaller relative changes count as unchanged."""


def percent_change(change: float) -> str:
    """Return a relative change as "25% down", "33% up" or "unchanged"."""
    if abs(change) < UNCHANGED:
        return "unchanged"
    return f"{abs(change):.0%} {'down' if change < 0 else 'up'}"
