"""What the report's parts are made of: tables, and figures in words."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell_text(text) for text in line) + " |" for line in lines)


def cell_text(text: str) -> str:
    return escape(text).replace("|", "\\|") or "-"


def escape(text: str) -> str:
    """``text`` on one line, with nothing in it that a reader of markdown takes for HTML or for an image to fetch, and no
    backquote that could open or close more than it does by itself."""
    said, at, parts = one_line(text), 0, []
    for kept in _KEPT.finditer(said):
        parts += [_escaped(said[at : kept.start()]), kept[0]]
        at = kept.end()
    rest = _escaped(said[at:])
    return "".join(parts) + rest + "\\" * rest.endswith("\\")


_KEPT = re.compile(r"\\[\\`]|(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)")
"""What is escaped already; and code spans, whose text is shown as it is (CommonMark 0.31, 6.1)."""


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("![", "!\\[").replace("`", "\\`")


def one_line(text: str) -> str:
    """``text`` without line breaks, its control characters shown."""
    return escape_invisible(" ".join(re.split(r"[ \t\r\n]+", text.strip(" \t\r\n"))))


def escape_invisible(text: str) -> str:
    """``text`` with control characters and halves of surrogate pairs as Python escapes them, but for tabs and newlines."""
    return "".join(c.encode("unicode_escape").decode() if _is_hidden(c) else c for c in text)


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\t\n"


def code_name(text: str) -> str:
    """``text`` as it can stand between backquotes."""
    return one_line(text).replace("`", "'")


def item(text: str) -> str:
    """``text`` as an item of a list, whatever it begins with."""
    said = escape(text)
    return "- " + re.sub(r"^(\d*)([#>+*=~_|\-\[.)])", r"\1\\\2", said)


def code_block(text: str, language: str) -> str:
    """``text`` as it is, in a fence that none of its lines can close."""
    shown = escape_invisible(text.rstrip("\n"))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence}{language}\n{shown}\n{fence}"


def figure(value: float) -> str:
    """A difference in three digits; what is not finite is said in words."""
    if not math.isfinite(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.2e}"


def size(value: int) -> str:
    """Bytes in MiB below one GiB, else in GiB."""
    return f"{value / 2**20:.0f} MiB" if abs(value) < 2**30 else f"{value / 2**30:.2f} GiB"
