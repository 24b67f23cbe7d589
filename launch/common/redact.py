"""Keep secrets and private paths out of records."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_SECRET_NAME = re.compile(
    # Not the end-of-document token of the data section, a number of tokens, or a tokenizer.
    r"(?i)(?<!eod_)token(?!s|iz)|secret|passw|passphrase|credential|authorization|api_?key|private_?key"
    r"|(?:^|[_-])(?:pat|jwt|o?auth|pass)(?:$|[_-])|[_-]key$"
)
_PLACE_NAME = re.compile(r"(?i)[_-](file|path|dir|sock|url|uri|stdin)$")
"""A variable or an option that says where a secret is, and holds none. A password in a URL is found in its value."""
_URL_PASSWORD = re.compile(r"(?<=://)[^\s/:@]*:(?!\$)([^\s/]+)(?=@)")
"""The ``user:password`` of a URL. The shell fills in ``https://user:${TOKEN}@host``, so that is none."""
_PASSWORD = re.compile(rf"{_URL_PASSWORD.pattern}|(?<![^\s\"'=#])[^\s/:@,]+:(?!\$)[^\s/:@,]+@(?!sha\d)")
"""The same without a URL, as in the name of an image. ``image:tag@sha256:...`` has none."""
_ASSIGNMENT = re.compile(r"\b(\w+)=[\"']?(?=[^\s\"'$`])|--([\w-]+)[=\s]\s*[\"']?(?=[^\s\"'$`-])")
"""A literal value in a line of shell: ``X=abc`` and ``--x abc``, but not ``X=$(cat file)``."""
_SHORTEST_REFUSED, _SHORTEST_REDACTED = 8, 6
"""Characters of a secret. A shorter value may be a word of any text, as in ``SLURM_JWT=daemon``."""
_EVERYWHERE = ("/", "/usr", "/usr/local")
"""Folders of a system's own Python. They identify nobody."""


def is_secret_name(name: str) -> bool:
    """Return whether the name of an environment variable looks like a secret's (HF_TOKEN, WANDB_API_KEY)."""
    return bool(_SECRET_NAME.search(name)) and not _PLACE_NAME.search(name)


class Secrets:
    """The secrets of an environment: the values of variables with a secret's name, and passwords in URLs."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        found = {value.strip(): name for name, value in environment.items() if is_secret_name(name)}
        for name, value in environment.items():
            found |= dict.fromkeys(_URL_PASSWORD.findall(value), name)
        # The longest first: a secret may begin with another one.
        self._names = {value: found[value] for value in sorted(found, key=len, reverse=True)}

    def find(self, text: str) -> str:
        """Return what secret ``text`` holds, in words; empty if it holds none."""
        for value, name in self._names.items():
            if len(value) >= _SHORTEST_REFUSED and value in text:
                return f"the value of ${name}"
        if _PASSWORD.search(text):
            return "user:password@"
        names = (short or long for short, long in _ASSIGNMENT.findall(text))
        return next((f"a literal {name}" for name in names if is_secret_name(name)), "")

    def holds(self, place: str, value: Any) -> bool:
        """Return whether a field has the name of a secret, or its ``value`` a secret in it. ``place`` is a dotted path."""
        return any(map(is_secret_name, re.split(r"[.\[\]]+", place))) or any(self.find_in(value))

    def find_in(self, value: Any, place: str = "") -> Iterator[tuple[str, str]]:
        """Yield the place of each secret in a value, its items and their names, and what :meth:`find` returns for it."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                if found := self.find(str(key)):
                    yield f"{place}.{key}", found
                yield from self.find_in(item, f"{place}.{key}")
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield from self.find_in(item, f"{place}[{index}]")
        elif found := self.find(str(value)):
            yield place, found

    def hide(self, text: str) -> str:
        """Return ``text`` with the name of each secret in place of its value."""
        for value, name in self._names.items():
            if len(value) >= _SHORTEST_REDACTED:
                text = text.replace(value, f"<{name}>")
        return _URL_PASSWORD.sub("<password>", text)


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Hide the secrets of ``environment`` in ``text``, and shorten paths to the package, the library or home.

    The working folder counts as private too, because sweeps are in it by default.
    """
    text = Secrets(environment).hide(text)
    places = _places()
    for place in sorted(places, key=len, reverse=True):
        # Match a whole path or its beginning: /usr in /usr/bin, but not in /data/usr or /usr2.
        text = re.sub(rf"(?<![\w.~>-]){re.escape(place)}(?![\w-])", places[place], text)
    return text


def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as Python does (sys.excepthook), without secrets."""
    sys.stderr.write(Secrets().hide("".join(traceback.format_exception(kind, error, trace))))


def _places() -> dict[str, str]:
    """Return the folders that identify a machine, with their replacements. Later entries win."""
    places = {
        str(Path.cwd()): ".",
        tempfile.gettempdir(): "<tmp>",
        os.path.expanduser("~"): "~",  # noqa: PTH111 (Path's fails where a container's user has no home)
        sys.base_prefix: "<python>",
        sys.prefix: "<python>",
        str(Path(__file__).resolve().parents[2]): ".",
    }
    return {place: name for place, name in places.items() if place not in _EVERYWHERE}
