"""What the report's parts are made of: tables, and figures in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell_text(text) for text in line) + " |" for line in lines)


def cell_text(text: str) -> str:
    return plain(text).replace("|", "\\|") or "-"


def plain(text: str) -> str:
    """``text`` on one line, with nothing in it that a reader of markdown takes for HTML or for an image to fetch."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))  # what stands in backquotes is shown as it is
    parts[::2] = [part.replace("<", "&lt;").replace("![", "!\\[") for part in parts[::2]]
    return "".join(parts)


def figure(value: float) -> str:
    """A difference in three digits; what is not finite is said in words."""
    if not math.isfinite(value):
        return "not finite"
    return "0" if value == 0 else f"{value:.2e}"


def size(value: int) -> str:
    """Bytes in MiB below one GiB, else in GiB."""
    return f"{value / 2**20:.0f} MiB" if abs(value) < 2**30 else f"{value / 2**30:.2f} GiB"
