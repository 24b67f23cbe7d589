"""What must not reach a record: values of secrets, and the private part of paths."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

_SECRET_NAME = re.compile(r"(?i)(token|secret|passw|credential|api_?key|private_?key)")
_SHORTEST_SECRET = 6


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret by the look of it (HF_TOKEN, WANDB_API_KEY)."""
    return bool(_SECRET_NAME.search(name))


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """``text`` without values of secret variables, and with paths told from the package, the library or home."""
    for name, value in environment.items():
        if is_secret_name(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, f"<{name}>")
    places = {
        str(Path(__file__).resolve().parent.parent): ".",
        sys.prefix: "<python>",
        sys.base_prefix: "<python>",
        str(Path.home()): "~",
    }
    for place in sorted(places, key=len, reverse=True):
        if len(place) > 1:
            text = text.replace(place, places[place])
    return text
