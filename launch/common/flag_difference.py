"""Find the flags in which two command lines differ. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launch.common.redact import is_secret_name, redact

_FLAG = re.compile(r"-+[A-Za-z]")
_ASSIGNMENT = re.compile(r"(\+{0,2}[A-Za-z_][\w./@-]*|-+[A-Za-z][\w.-]*)=(.*)|(-[A-Za-z])(-?\.?\d.*)", re.DOTALL)
"""``--lr=1``, a variable before the program (``X=1``), an override of Hydra (``+optim.lr=1``, ``optim/kind=sgd``), or ``-b32``."""


@dataclass(frozen=True)
class FlagDifference:
    """A flag, a variable, or the words that follow none (an empty ``name``). A side without it is None."""

    name: str
    eager: str | None
    graphed: str | None

    @property
    def text(self) -> str:
        """Describe the difference in Markdown, without secrets."""
        if self.eager is not None and self.graphed is not None:
            name = f"`{self.name}`" if self.name else "words"
            return f"{name}: {_quote(self._show(self.eager))} eager, {_quote(self._show(self.graphed))} graphed"
        value, side = (self.eager, "eager") if self.graphed is None else (self.graphed, "graphed")
        return f"{_quote(f'{self.name} {self._show(value)}')} only {side}"

    def _show(self, value: str | None) -> str:
        name = self.name.lstrip("-")
        return f"<{name}>" if value and is_secret_name(name) else value or ""


def flag_differences(eager: Sequence[str], graphed: Sequence[str]) -> tuple[FlagDifference, ...]:
    """Return the flags whose values differ between the words of two commands, or that one of them lacks, in their order."""
    before, after = read_flags(eager), read_flags(graphed)
    return tuple(
        FlagDifference(name, before.get(name), after.get(name))
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    )


def read_flags(words: Sequence[str]) -> Mapping[str, str]:
    """Return the value of each flag: the words up to the next flag, joined."""
    values: dict[str, list[str]] = {}
    name = ""
    for word in _flat(words):
        found = _ASSIGNMENT.fullmatch(word)
        if found:
            values.setdefault((found[1] or found[3]).lstrip("+"), []).append(found[2] or found[4] or "")
            name = ""
        elif _FLAG.match(word):
            values.setdefault(name := word, [])
        else:
            values.setdefault(name, []).append(word)
    return {name: " ".join(found) for name, found in values.items()}


def _flat(words: Sequence[str]) -> Iterator[str]:
    """Yield words. A word with blanks may be a command of its own, as in ``bash -c 'python train.py --x'``."""
    for word in words:
        try:
            inner = shlex.split(word) if re.search(r"\s", word) else [word]
        except ValueError:
            inner = [word]
        yield from inner


def _quote(text: str) -> str:
    return f"`{redact(text.strip())}`" if text.strip() else "nothing"
