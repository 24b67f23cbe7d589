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
    "step": ("globalstep", "trainerglobalstep", "step", "iteration", "currentsteps"),
    "loss": ("loss", "lmloss", "reducedtrainloss", "lossmetricsglobalavgloss"),
    "grad_norm": ("gradnorm", "gradientnorm", "gradientsnorm", "globalgradnorm", "totalnorm", "gnorm", "norm"),
}
"""The usual names of each column, as :func:`letters` spells them. An earlier one counts more in a line with several."""
_COLUMNS = {name: column for column, names in NAMES.items() for name in names}

_DECODER = json.JSONDecoder(parse_float=str)
_CONTROL = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
"""What sets a terminal's colour, or moves its cursor."""
# Percentages, numbers with a comma and numbers before a damaged byte do not match. Without a bound on the name's length, a long
# line would take seconds.
_PAIR = re.compile(
    r"(?<![A-Za-z\d])([A-Za-z][A-Za-z_ /.-]{0,40}?)['\"]?(?:\s*[:=]\s*|\s+)(?:(?:tensor|array|j?np\.\w{1,10})\()?['\"]?"
    r"([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+|nan|inf)(?!\.?[\w\ufffd]))(?!\s*%|,\d)",
    re.IGNORECASE,
)
_REST = re.compile(r"(?:_\d{1,3} |[A-Za-z_]\d{1,3}[_/.-])\Z")
"""What stands before the rest of a name with digits, such as "mtp_1 loss" or l2_loss, which are not the loss."""
_OTHER = re.compile(
    r"\b(?:val|valid|validate|validating|validation|eval|evaluate|evaluating|evaluation|test|testing|dev|ema)\b",
    re.IGNORECASE,
)
"""Words that mark a loss as that of an evaluation, and not of training."""
_SUMMARY = re.compile(r"\btrain_runtime\b|^train_loss\s+=|\bwandb: |\bstep \d+: train loss \S+, val loss ")
"""The lines with the mean loss of a whole run that Hugging Face's Trainer and its example scripts print at the end, W&B's summary
of a run, and nanoGPT's estimates over some batches."""
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf|infinity)", re.IGNORECASE)
_STEP = re.compile(r"(?<!/)(?<!/ )(?<!per )\b(?:iteration|step|iter)\s*[:=]?\s*(\d+)\b(?!\s*%|,\d|\.\d)", re.IGNORECASE)
"""The number of a step. A time per step (``ms/step: 83``) is none."""
_UNIT = re.compile(r"\s*(?:[mun\u00b5]?s|m?secs?|(?:milli|micro)?seconds?)\b", re.IGNORECASE)
"""A unit of time after a number: ``step 83 ms`` is the time of a step."""
_NUMBERED = re.compile(r"(?:step|iteration|iter|epoch)$", re.IGNORECASE)
_COMMA = re.compile(
    r"([A-Za-z][A-Za-z_ /.-]{0,40}?)['\"]?(?:\s*[:=]\s*|\s+)([-+]?\d[\d.]{0,30},\d[\d.,]{0,30})", re.IGNORECASE
)


@lru_cache(maxsize=1024)
def letters(name: str) -> str:
    """Return the letters (in lower case) and digits of ``name``, without a leading "train"."""
    return "".join(filter(str.isalnum, name.lower())).removeprefix("train")


@lru_cache(maxsize=1024)
def column_of(name: str) -> Column | None:
    """Return the column that ``name`` usually means, or None."""
    return _COLUMNS.get(letters(name))


def known_names(record: Mapping[Any, Any]) -> list[tuple[Column, Any]]:
    """Return the columns of ``record``, each with its name there. Of several names of one column the most usual comes first."""
    known = [(column, name) for name in record if (column := column_of(str(name)))]
    return sorted(known, key=lambda one: _rank(str(one[1]))) if len(known) > 1 else known


@lru_cache(maxsize=1024)
def _rank(name: str) -> tuple[int, int]:
    return NAMES[_COLUMNS[letters(name)]].index(letters(name)), len(name)


def texts_in_line(line: str) -> dict[Column, str]:
    """Return the step, loss and gradient norm in ``line``: JSON, a Python dictionary, or names followed by numbers.

    Return nothing if the line has no loss, or if its words mark the loss as that of an evaluation or of a whole run.
    """
    if "loss" not in line.lower():
        return {}
    text = _without_control(line).strip()
    # Looking for a word of each summary first takes a small part of the time.
    if ("train" in text or "wandb" in text) and _SUMMARY.search(text):
        return {}
    record = _record(text) if text.startswith("{") else {}
    found = _columns(record)
    if any(isinstance(value, str) and _OTHER.fullmatch(value) for value in record.values()):
        return {}
    if not found:
        pairs = _training_pairs(text)
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
    pairs = _COMMA.finditer(_without_control(line))
    return next((pair[0].strip() for pair in pairs if column_of(pair[1])), "")


def _without_control(line: str) -> str:
    return _CONTROL.sub("", line) if "\x1b" in line else line


def names_evaluation(title: str) -> bool:
    """Return whether words of ``title`` mark the losses under it as those of an evaluation."""
    return bool(_OTHER.search(title))


def _training_pairs(text: str) -> list[re.Match[str]]:
    """Return the names and numbers in ``text`` without losses of an evaluation. Return none if its first loss is one."""
    pairs = [pair for pair in _PAIR.finditer(text) if not _REST.search(text, max(pair.start() - 5, 0), pair.start())]
    losses = [place for place, pair in enumerate(pairs) if column_of(pair[1]) == "loss"]
    others = [place for place in losses if _OTHER.search(_words_before(text, pairs, place))]
    return [] if losses[:1] == others[:1] else [pair for place, pair in enumerate(pairs) if place not in others]


def _words_before(text: str, pairs: Sequence[re.Match[str]], place: int) -> str:
    """Return the words before a pair, without the pairs of names and numbers, but with the names of steps."""
    ends = [0, *(pair.end() for pair in pairs[:place])]
    words = [text[end : pair.start()] for end, pair in zip(ends, pairs[: place + 1], strict=True)]
    return " ".join([*words, *(pair[1] for pair in pairs[:place] if _NUMBERED.search(pair[1]))])


def _is_time(number: re.Match[str], text: str) -> bool:
    """Return whether a unit of time follows ``number`` in ``text``."""
    return bool(_UNIT.match(text, number.end()))


def is_value_of(column: Column, number: float) -> bool:
    """Return whether ``number`` may be a value of ``column``. Steps have whole numbers: ``step: 0.083`` is a time."""
    return column != "step" or number.is_integer()


def _columns(record: Mapping[Any, Any]) -> dict[Column, str]:
    found: dict[Column, str] = {}
    for column, name in known_names(record):
        text = str(record[name])
        if column not in found and _NUMBER.fullmatch(text) and is_value_of(column, float(text)):
            found[column] = text
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
