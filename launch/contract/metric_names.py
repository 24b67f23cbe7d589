"""Recognize a step, its loss and its gradient norm by the names that programs give them, in records and in log lines."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

Column = Literal["step", "loss", "grad_norm"]
NAMES: Mapping[Column, tuple[str, ...]] = {
    "step": ("step", "iteration", "globalstep", "trainerglobalstep"),
    "loss": ("loss", "lmloss", "reducedtrainloss", "lossmetricsglobalavgloss"),
    "grad_norm": ("gradnorm", "gradientnorm", "gradientsnorm", "globalgradnorm", "totalnorm", "norm", "gnorm"),
}
"""The usual names of each column, as :func:`letters` spells them."""
_COLUMNS = {name: column for column, names in NAMES.items() for name in names}

_DECODER = json.JSONDecoder(parse_float=str)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Percentages and numbers with a comma do not match. Without a bound on the name's length, a long line would take seconds.
_PAIR = re.compile(
    r"(?<![A-Za-z\d])([A-Za-z][A-Za-z_ /.-]{0,40}?)['\"]?(?:\s*[:=]\s*|\s+)(?:tensor\()?['\"]?"
    r"([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|\.\d+|nan|inf)(?![\w]|\.\w))(?!\s*%|,\d)",
    re.IGNORECASE,
)
_OTHER = re.compile(
    r"\b(?:val|valid|validate|validating|validation|eval|evaluate|evaluating|evaluation|test|testing|dev|ema)\b",
    re.IGNORECASE,
)
"""Words that mark a loss as that of an evaluation, and not of training."""
_SUMMARY = re.compile(r"\btrain_runtime\b|^\s*train_loss\s+=|^step \d+: train loss \S+, val loss ")
"""The lines with the mean loss of a whole run that Hugging Face's Trainer and its example scripts print at the end, and nanoGPT's
estimates over some batches."""
_NUMBER = re.compile(r"[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|\.\d+|nan|inf|infinity)", re.IGNORECASE)
_STEP = re.compile(r"(?<!/)(?<!/ )(?<!per )\b(?:iteration|step|iter)\s*[:=]?\s*(\d+)\b(?!\s*%|,\d|\.\d)", re.IGNORECASE)
"""The number of a step. A time per step (``ms/step: 83``) is none."""
_UNIT = re.compile(r"\s*(?:[mun\u00b5]?s|m?secs?|(?:milli|micro)?seconds?)\b", re.IGNORECASE)
"""A unit of time after a number: ``step 83 ms`` is the time of a step."""
_NUMBERED = re.compile(r"(?:step|iteration|iter|epoch)$", re.IGNORECASE)
_COMMA = re.compile(
    r"([A-Za-z][A-Za-z_ /.-]{0,40}?)['\"]?(?:\s*[:=]\s*|\s+)([-+]?\d[\d.]{0,30},\d[\d.,]{0,30})", re.IGNORECASE
)


def letters(name: str) -> str:
    """Return the letters (in lower case) and digits of ``name``, without a leading "train"."""
    return "".join(filter(str.isalnum, name.lower())).removeprefix("train")


@lru_cache(maxsize=1024)
def column_of(name: str) -> Column | None:
    """Return the column that ``name`` usually means, or None."""
    return _COLUMNS.get(letters(name))


def texts_in_line(line: str) -> dict[Column, str]:
    """Return the step, loss and gradient norm in ``line``: JSON, a Python dictionary, or names followed by numbers.

    Return nothing if the line has no loss, or if its words mark the loss as that of an evaluation or of a whole run.
    """
    if "loss" not in line.lower() or _SUMMARY.search(line):
        return {}
    text = _COLOUR.sub("", line).strip()
    record = _record(text) if text.startswith("{") else {}
    found = _columns(record)
    if any(isinstance(value, str) and _OTHER.fullmatch(value) for value in record.values()):
        return {}
    if not found:
        pairs = list(_PAIR.finditer(text))
        if _OTHER.search(_words_before_loss(text, pairs)):
            return {}
        found = _columns({pair[1]: pair[2] for pair in reversed(pairs) if not _is_time(pair, text)})
        if "step" not in found and (
            step := next((one for one in _STEP.finditer(text) if not _is_time(one, text)), None)
        ):
            found["step"] = step[1]
    return found if "loss" in found else {}


def comma_in_line(line: str) -> str:
    """Return the first step, loss or gradient norm in ``line`` whose number has a comma; "" if there is none."""
    if "," not in line or "loss" not in line.lower():
        return ""
    pairs = _COMMA.finditer(_COLOUR.sub("", line))
    return next((pair[0].strip() for pair in pairs if column_of(pair[1])), "")


def names_evaluation(title: str) -> bool:
    """Return whether words of ``title`` mark the losses under it as those of an evaluation."""
    return bool(_OTHER.search(title))


def _words_before_loss(text: str, pairs: Sequence[re.Match[str]]) -> str:
    """Return the words before the loss, without the pairs of names and numbers, but with the names of steps."""
    number = next((number for number, pair in enumerate(pairs) if column_of(pair[1]) == "loss"), -1)
    ends = [0, *(pair.end() for pair in pairs[:number])]
    words = [text[end : pair.start()] for end, pair in zip(ends, pairs[: number + 1], strict=False)]
    return " ".join([*words, *(pair[1] for pair in pairs[:number] if _NUMBERED.search(pair[1]))])


def _is_time(number: re.Match[str], text: str) -> bool:
    """Return whether a unit of time follows ``number`` in ``text``."""
    return bool(_UNIT.match(text, number.end()))


def is_value_of(column: Column, number: float) -> bool:
    """Return whether ``number`` may be a value of ``column``. Steps have whole numbers: ``step: 0.083`` is a time."""
    return column != "step" or number.is_integer()


def _columns(record: Mapping[Any, Any]) -> dict[Column, str]:
    found: dict[Column, str] = {}
    for name, value in record.items():
        column = column_of(str(name))
        if (
            column is not None
            and column not in found
            and _NUMBER.fullmatch(str(value))
            and is_value_of(column, float(str(value)))
        ):
            found[column] = str(value)
    return found


def _record(text: str) -> Mapping[Any, Any]:
    """Return the JSON object or Python dictionary in ``text``. Floats of JSON stay text, exactly as printed."""
    try:
        # Parsing a Python literal takes three times as long.
        record = _DECODER.decode(text if '"' in text else text.replace("'", '"'))
    except ValueError:
        try:
            record = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return {}
    return record if isinstance(record, dict) else {}
