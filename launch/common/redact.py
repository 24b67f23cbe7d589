"""Keep secrets and private paths out of records."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_SECRET_NAME = re.compile(r"(?i)(token|secret|passw|credential|api_?key|private_?key)")
_SHORTEST_SECRET = 6
_EVERYWHERE = ("/", "/usr", "/usr/local")
"""Folders of a system's own Python. They identify nobody."""


def is_secret_name(name: str) -> bool:
    """Return whether the name of an environment variable looks like a secret's (HF_TOKEN, WANDB_API_KEY)."""
    return bool(_SECRET_NAME.search(name))


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replace values of secret variables in ``text``, and shorten paths to the package, the library or home.

    The working folder counts as private too, because sweeps are in it by default.
    """
    secrets = {value: f"<{name}>" for name, value in environment.items() if is_secret_name(name)}
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, secrets[value])
    places = _places()
    for place in sorted(places, key=len, reverse=True):
        # Match a whole path or its beginning: /usr in /usr/bin, but not in /data/usr or /usr2.
        text = re.sub(rf"(?<![\w.~>-]){re.escape(place)}(?![\w-])", places[place], text)
    return text


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
