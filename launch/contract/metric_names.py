"""The names that programs give to a step, its loss and its gradient norm, and what a line of their logs says of them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

Column = Literal["step", "loss", "grad_norm"]
NAMES: Mapping[Column, tuple[str, ...]] = {
    "step": ("step", "iteration", "globalstep", "trainerglobalstep"),
    "loss": ("loss", "lmloss", "reducedtrainloss", "lossmetricsglobalavgloss"),
    "grad_norm": ("gradnorm", "gradientnorm", "gradientsnorm", "globalgradnorm", "totalnorm", "norm", "gnorm"),
}
"""The usual names of each column, as :func:`letters` spells them."""
_COLUMNS = {name: column for column, names in NAMES.items() for name in names}

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PAIR = re.compile(
    r"([A-Za-z][A-Za-z_ /.-]*?)['\"]?(?:\s*[:=]\s*|\s+)['\"]?([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf)\b)",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf|infinity)", re.IGNORECASE)
_STEP = re.compile(r"\b(?:iteration|step|iter)\s*[:=]?\s*(\d+)\b", re.IGNORECASE)


def letters(name: str) -> str:
    """Return ``name`` in small letters and digits alone, without a leading "train"."""
    return "".join(filter(str.isalnum, name.lower())).removeprefix("train")


def column_of(name: str) -> Column | None:
    """Return the column that ``name`` usually means, or None."""
    return _COLUMNS.get(letters(name))


def texts_in_line(line: str) -> dict[Column, str]:
    """Return step, loss and gradient norm as a line has them: JSON, a Python dictionary, or names with numbers.

    Empty without a loss.
    """
    text = _COLOUR.sub("", line).strip()
    found = _columns(_record(text)) if text.startswith("{") else {}
    if not found:
        found = _columns(dict(reversed(_PAIR.findall(text))))
        if "step" not in found and (step := _STEP.search(text)):
            found["step"] = step[1]
    return found if "loss" in found else {}


def _columns(record: Mapping[Any, Any]) -> dict[Column, str]:
    found: dict[Column, str] = {}
    for name, value in record.items():
        column = column_of(str(name))
        if column is not None and column not in found and _NUMBER.fullmatch(str(value)):
            found[column] = str(value)
    return found


def _record(text: str) -> Mapping[Any, Any]:
    """Return the JSON object or the Python dictionary in ``text``, with its floats as they are printed."""
    try:
        record = json.loads(text, parse_float=str)
    except ValueError:
        try:
            record = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return {}
    return record if isinstance(record, dict) else {}
