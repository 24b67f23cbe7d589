"""Plain text: counts, sizes, and text made safe for a single line."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence


def count(noun: str, number: float) -> str:
    """Return ``number`` with its ``noun``: "1 cell", "2 cells", "2 graph launches"."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{f'{number:,}' if isinstance(number, int) else f'{number:g}'} {noun if number == 1 else plural}"


def numbered(noun: str, numbers: Sequence[object], most: int | None = None) -> str:
    """Return ``noun`` before the first ``most`` of ``numbers``: "rank 3", "steps 3, 5 and 2 more"."""
    return f"{noun}{'s' * (len(numbers) > 1)} {listed(numbers, most)}"


def listed(items: Sequence[object], most: int | None = None, separator: str = ", ") -> str:
    """Return the first ``most`` of ``items`` and the number of the rest: "a, b and 2 more"."""
    shown = items[:most]
    rest = f" and {len(items) - len(shown)} more" if len(shown) < len(items) else ""
    return separator.join(map(str, shown)) + rest


def first_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` of ``names`` and the number of the rest: "a; b; and 2 more"."""
    return "; ".join([*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])])


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return ``rows``, which have equally many words, as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def size(value: int) -> str:
    """Return a number of bytes in MiB if below 1 GiB, otherwise in GiB."""
    return f"{value / 2**20:.0f} MiB" if abs(value) < 2**30 else f"{value / 2**30:.2f} GiB"


def duration(seconds: float) -> str:
    """Return ``seconds`` in the unit that suits them: "45 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def one_line(text: str) -> str:
    """Return ``text`` without line breaks and with its control characters escaped."""
    return escape_invisible(" ".join(re.split(r"[ \t\r\n]+", text.strip(" \t\r\n"))))


def escape_invisible(text: str) -> str:
    """Escape control characters and lone surrogates as Python does. Tabs and newlines stay."""
    if text.translate(_KEPT).isprintable():
        # This is the usual case, and `status` may print a megabyte.
        return text
    return "".join(c.encode("unicode_escape").decode() if _is_hidden(c) else c for c in text)


_KEPT = {ord(character): " " for character in "\t\n"}


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and ord(character) not in _KEPT


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode ``text``. It cannot encode half of a surrogate pair, which stands for some other byte."""
    return text == text.encode(errors="replace").decode()


def code_name(text: str) -> str:
    """Return ``text`` in a form that can appear between backquotes."""
    return one_line(text).replace("`", "'")
