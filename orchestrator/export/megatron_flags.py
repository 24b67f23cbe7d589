"""The flags of a command line, as Megatron-LM's parser takes them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Flags = Mapping[str, Sequence[str]]
"""The words after each flag. The key is the flag's name with underscores, or includes its single dash (``-p``)."""


class Translation(NamedTuple):
    """Flags or a recipe as text, and notes on what it does not express."""

    text: str
    notes: tuple[str, ...]


def parse_flags(words: Iterable[str]) -> Flags:
    """Return the flags among ``words``. The last of equal flags counts. Words before the first flag are ignored."""
    return dict(each_flag(words))


def each_flag(words: Iterable[str]) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found.append((name.replace("-", "_"), [value] if equals else []))
        elif re.match("-[A-Za-z]", word):
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
    return found


def spell_flag(name: str, words: Sequence[str] = ()) -> str:
    return " ".join([name if name.startswith("-") else "--" + name.replace("_", "-"), *words])


def is_number(words: Sequence[str]) -> bool:
    return bool(words) and words[0].isdecimal() and int(words[0]) > 0
