"""Keep secrets and private paths out of records."""

from __future__ import annotations

import html
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote

from launch import ROOT

_SECRET_NAME = re.compile(
    # This excludes the end-of-document token of the data section, numbers of tokens, tokenizers, and Megatron's flags of
    # experts.
    r"(?<!eod_)(?<!moe_)token(?!s|iz)|secret|passw|passphrase|credential|authorization|api_?key|private_?key"
    r"|(?:^|_)(?:pat|jwt|o?auth|pw|creds?)(?:$|_)|(?<!by)(?<!com|ask)pass(?:$|_)"
    # This excludes the shell's folder, keys of Slurm accounts and InfiniBand partitions, and ordinary words.
    r"|(?<=.)(?<!^old)pwd(?:$|_)|(?<=.)(?<!wc|_p)(?<!mon|don|tur|hot|pub)key$"
)
_IN_SECRET_NAMES = ("token", "secret", "pass", "cred", "auth", "key", "pat", "jwt", "pw")
"""Each match of :data:`_SECRET_NAME` contains one of these. A long text seldom does."""
_PLACE_NAME = re.compile(r"_(file|path|dir|sock|url|uri|stdin)$")
"""How names end whose value is the place of a secret, and not the secret. A password in a URL is found by its value."""
_PORT = r"(?!\d{1,5}(?:[/?#]|$))"
"""Excludes the port of ``https://host:80/x@y``, because a password may contain "/" and "@"."""
_URL_LOGIN = re.compile(
    # https://user:${TOKEN}@host does not match, because the shell fills it in.
    rf"(?<=://)(?P<user>[^\s/:@]{{0,999}}):(?!\$)(?P<password>{_PORT}[^\s\"'<>,]{{1,999}}|[^\s/]{{1,999}})(?=@)"
    r"|(?:(?<=http://)|(?<=https://))(?P<token>[^\s/:@$]{8,999})(?=:?@)"
)
"""The ``user:password`` of a URL, or a token in its place. A user name of up to seven characters is not a token (``git@``)."""
_IMAGE_LOGIN = re.compile(rf"(?<![^\s\"'=#])[^\s/:@,]{{1,99}}:(?![$/]){_PORT}[^\s:@,]{{1,999}}@(?!sha\d)")
"""The same outside a URL, as in the name of an image. ``image:tag@sha256:...`` does not match."""
_TOKEN = re.compile(
    # Each form begins with a letter, for speed. The "sk-" of task-1 does not match.
    r"(?P<form>hf_(?=[A-Za-z0-9]{16})|s(?<![A-Za-z0-9]s)k-(?=[\w-]{0,40}[A-Za-z0-9]{16})|gh[opsu]_(?=[A-Za-z0-9]{16})"
    r"|github_pat_(?=\w{16})|AKIA(?=[A-Z0-9]{16})|eyJ(?=[\w-]{8,999}\.eyJ[\w-]{8})|glpat-(?=[\w-]{16})|xox[a-z]-(?=[\w-]{10}))[\w.-]+"
)
"""Tokens in the formats of their issuers: Hugging Face, OpenAI, GitHub, AWS, a JWT, GitLab, Slack."""
_NAMED = re.compile(
    r"""(?<![\w$-])(?:--(?P<option>\w[\w-]*)(?:=|[ \t]+(?!-))        # --x abc, --x=abc
      | (?P<name>\w[\w-]*)(?:=|[ \t]+=[ \t]+                         # X=abc, but not X=$(cat file)
        | \\*["']?[ \t]*:[ \t]*(?=\\*["'])                           # {"x": "abc"}, also as text in JSON
        | \\*["']?:[ \t]+(?:\w+[ \t]+)?(?=\S{6})(?=\S*\d)))          # Authorization: Bearer abc123""",
    re.VERBOSE,
)
_VALUE = re.compile(
    r"""(?P<quote>\\*["'])?+(?![$`]|<[\w-]+>|\*\*\*)"""
    r"""(?P<value>(?(quote)(?:(?!(?P=quote))\\?(?s:.))+|[^\s"'`;&)=][^\s"'`;&]*))"""
)
"""A literal value after a name. Values that the shell fills in, or that are already hidden, do not match."""
_SHORTEST_REFUSED, _SHORTEST_REDACTED, _SHORTEST_USER = 8, 6, 16
"""The least characters of a secret. A shorter value may be an ordinary word, as in ``SLURM_JWT=daemon``, or a user name."""
_EVERYWHERE = ("/", "/usr", "/usr/local")
"""Folders of a system's own Python, which identify nobody."""


def is_secret_name(name: str) -> bool:
    """Return whether the name of an environment variable looks like that of a secret (HF_TOKEN, wandbApiKey, X-Auth)."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
    return bool(_SECRET_NAME.search(words)) and not _PLACE_NAME.search(words)


class Secrets:
    """The secrets of an environment: values of variables with the name of a secret, and secrets within the values of others."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        found = {value.strip(): name for name, value in environment.items() if is_secret_name(name)}
        for name, value in environment.items():
            found |= dict.fromkeys(_secrets_in(value), name)
        # Sort the longest first, because a secret may begin with another one.
        self._names = {
            value: found[value] for value in sorted(found, key=len, reverse=True) if len(value) >= _SHORTEST_REDACTED
        }

    def find(self, text: str) -> str:
        """Describe the secret in ``text``; return "" if it contains none."""
        for value, name in self._names.items():
            if len(value) >= _SHORTEST_REFUSED and _spellings(value).search(text):
                return f"the value of ${name}"
        if login := _URL_LOGIN.search(text) or _IMAGE_LOGIN.search(text):
            return f"a {'token' if login.groupdict().get('token') else 'password'} before @"
        if literal := next(_literals(text), None):
            return f"a literal {literal[0]}"
        return f"a token {token['form']}..." if (token := _TOKEN.search(text)) else ""

    def holds(self, place: str, value: Any) -> bool:
        """Return whether a field has the name of a secret, or its ``value`` contains one. ``place`` is a dotted path."""
        return any(map(is_secret_name, re.split(r"[.\[\]]+", place))) or any(self.find_in(value))

    def find_in(self, value: Any, place: str = "") -> Iterator[tuple[str, str]]:
        """Yield the place of each secret in a value, its items and their names, with the result of :meth:`find`."""
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
        """Return ``text`` with each secret's value replaced by its name."""
        for value, name in self._names.items():
            text = _spellings(value).sub(f"<{name}>".replace("\\", r"\\"), text)
        if "@" in text:
            text = _IMAGE_LOGIN.sub("<password>@", _URL_LOGIN.sub("<password>", text))
        for name, value in reversed(list(_literals(text))):
            text = f"{text[: value.start]}<{name}>{text[value.stop :]}"
        return _TOKEN.sub("<token>", text)


def _literals(text: str) -> Iterator[tuple[str, slice]]:
    """Yield the name and the place of each value that ``text`` assigns to the name of a secret."""
    lowered, end = text.lower(), 0
    # `status` may print a megabyte. Checking each of its words would take longer than reading the plan.
    for named in _NAMED.finditer(text) if any(part in lowered for part in _IN_SECRET_NAMES) else ():
        name = named["option"] or named["name"]
        if named.end() >= end and is_secret_name(name) and (found := _VALUE.match(text, named.end())):
            end = found.end()
            yield name, slice(*found.span("value"))


def _secrets_in(text: str) -> Iterator[str]:
    """Yield the passwords of URLs in a variable's value, and the values that it assigns to names of secrets."""
    for login in _URL_LOGIN.finditer(text):
        user, password, token = (login[part] or "" for part in ("user", "password", "token"))
        # Both a password and the path after it may contain "@".
        found = [token, password, *(password[: at.start()] for at in re.finditer("@", password))]
        if len(user) >= _SHORTEST_USER or password == "x-oauth-basic":
            found = [*found, user]
        yield from {spelling for part in found for spelling in (part, unquote(part))}
    yield from (text[place] for _, place in _literals(text))


@cache
def _spellings(value: str) -> re.Pattern[str]:
    """Return a pattern that matches ``value`` itself, and its spellings in repr, JSON, HTML, a URL or the shell."""
    return re.compile("".join(map(_spellings_of, value)))


def _spellings_of(character: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_.~-]", character):
        return re.escape(character)
    if character == "\\":
        return r"(?:\\+|%5[Cc])"
    escapes = (character.encode("unicode_escape").decode(), json.dumps(character)[1:-1])
    code = quote(character, safe="", errors="replace")
    codes = (code, code.lower(), html.escape(character), *(escape.lstrip("\\") for escape in escapes))
    plain = "|".join(map(re.escape, dict.fromkeys((character, *codes))))
    # The shell spells a quote by closing and reopening its quotes.
    return rf"""(?:'\\''|'"'"'|\\*(?:{plain}))""" if character == "'" else rf"\\*(?:{plain})"


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Hide the secrets of ``environment`` in ``text``, and shorten paths to the package, the library or home.

    The working folder is private too, because sweeps are in it by default.
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
        str(ROOT): ".",
    }
    return {place: name for place, name in places.items() if place not in _EVERYWHERE}
