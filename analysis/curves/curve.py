"""A loss curve of any framework, read from CSV or JSON lines.

A file has a step, a loss and optionally a gradient norm, under the names that programs give them. Other columns are ignored.
A file that begins with a brace holds JSON lines, as metrics.jsonl does. NaN and the infinities are accepted; the verdict judges
them.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from analysis.curves.resolution import resolution, rounded_units
from analysis.records.steps import Floats, Steps
from launch.common.regular_file import read_regular
from launch.contract.metric_names import NAMES, Column, letters
from launch.contract.records.step_metrics import METRICS, Metric

MOST_BYTES = 256 << 20
_MAXIMUM_NAMES = 8
"""How many columns an error names."""
Row = tuple[str, Mapping[str, Any]]
Rows = Sequence[Row]
"""For each line, its place as errors name it and its values by column."""


class CurveError(Exception):
    """A file is not a curve, or files do not belong together. The message names the file and, if there is one, the line."""


@dataclass(frozen=True)
class Curve:
    """The curve of one file. Gradient norms are NaN if the file has none.

    ``units`` maps each metric in the file to the units of the last printed digits (0.01 for 2.50), shape (steps,).
    """

    steps: Steps
    units: Mapping[Metric, Floats]
    columns: tuple[str, ...]
    """The names of the columns that were read."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The settings of its run that the file states (analysis.curves.log_settings)."""
    skipped: frozenset[int] = frozenset()
    """The steps without a loss that loss scaling skipped, as the file states."""

    @cached_property
    def resolution(self) -> dict[Metric, Floats]:
        """The unit in which each metric is recorded, by its number format or its print (analysis.curves.resolution).

        Shape (steps,).
        """
        return {metric: resolution(self.steps.of(metric), units) for metric, units in self.units.items()}

    @property
    def rounded(self) -> dict[Metric, Floats]:
        """The units of rounded numbers, or 0 for numbers with all bits of float32, shape (steps,)."""
        return {metric: rounded_units(self.steps.of(metric), units) for metric, units in self.resolution.items()}


def curve_of_record(steps: Steps, metrics: Sequence[Metric]) -> Curve:
    """Return the curve of a run's record. The units of its numbers follow from their shortest digits, without zeros at the end."""
    digits = {
        metric: [Decimal(value).normalize() for value in map(repr, steps.of(metric).tolist())] for metric in metrics
    }
    return Curve(
        steps, {metric: np.array([*map(unit_of, found)]) for metric, found in digits.items()}, ("step", *metrics)
    )


def read_rows(path: Path) -> list[Row]:
    """Return the rows of CSV or JSON lines.

    Raises:
        CurveError: the file cannot be read, or is neither of the two.
    """
    text = read_text(path)
    if re.match(r"\s*\[\s*[{\[\]]", text):
        raise CurveError(f"{path}: a JSON array; write an object a line (JSON lines)")
    if re.match(r"\s*(\x1b)?\[", text):
        raise CurveError(f"{path}: looks like a log; write its steps, losses and gradient norms as CSV or JSON lines")
    return list((_json_rows if text.lstrip().startswith("{") else _csv_rows)(path, text))


def curve_of(path: Path, rows: Rows) -> Curve:
    """Return the curve in the ``rows`` of a file.

    Raises:
        CurveError: the rows hold no curve, or a metric is missing in some of them.
    """
    if not rows:
        raise CurveError(f"{path}: no step")
    columns = _find_columns(str(path), list(dict.fromkeys(name for _, row in rows for name in row)))
    rows = _without_evaluations(rows, columns)
    _check_every_row(rows, columns)
    steps = np.array([_step(at, row, columns["step"]) for at, row in rows], dtype=np.int64)
    found = {metric: columns[metric] for metric in METRICS if metric in columns}
    values = {metric: np.array([_metric(at, row, metric, name) for at, row in rows]) for metric, name in found.items()}
    units = {metric: np.array([unit_of(row[name]) for _, row in rows]) for metric, name in found.items()}
    none = np.full(len(rows), np.nan)
    tokens, phase = np.zeros(len(rows), dtype=np.int64), np.full(len(rows), "", dtype="U8")
    numbers = Steps(steps, values["loss"], values.get("grad_norm", none), none, tokens, phase)
    return Curve(numbers, units, tuple(columns.values()))


def read_text(path: Path, invalid: Literal["strict", "replace"] = "strict") -> str:
    """Return the text in ``path``. ``invalid``: what to do with bytes that are not UTF-8."""
    try:
        content = read_regular(path, MOST_BYTES)
        if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise CurveError(f"{path}: UTF-16 and not UTF-8 text; convert it to UTF-8")
        return content.decode("utf-8-sig", invalid)
    except OSError as error:
        raise CurveError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CurveError(f"{path}: not UTF-8 text (byte {error.start}); convert it to UTF-8") from error


# --- rows -----------------------------------------------------------------------------------------------------------


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    try:
        for row in filter(None, reader):
            at = f"{path}, line {reader.line_num}"
            if not header:
                header = [name.strip() for name in row]
                _check_once(at, header)
                _find_columns(at, header)
            elif len(row) != len(header):
                raise CurveError(f"{at}: {len(row)} values, but the header names {len(header)} columns")
            else:
                yield at, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise CurveError(f"{path}, line {reader.line_num}: {error}") from error


class Digits(str):
    """A number of a JSON line as it was printed."""

    __repr__ = str.__str__


def _json_rows(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        at = f"{path}, line {number}"
        try:
            # An object becomes a tuple of its pairs: a dict would drop all but the last of a name.
            pairs = json.loads(line, parse_float=Digits, object_pairs_hook=tuple)
        except (ValueError, RecursionError) as error:
            raise CurveError(f"{at}: not JSON") from error
        if not isinstance(pairs, tuple):
            raise CurveError(f"{at}: not a JSON object")
        _check_once(at, [name for name, _ in pairs])
        yield at, dict(pairs)


def _check_once(at: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1 and any(letters(name) in usual for usual in NAMES.values()):
            raise CurveError(f"{at}: {name} appears more than once")


# --- columns --------------------------------------------------------------------------------------------------------


def _find_columns(at: str, names: Sequence[str]) -> dict[Column, str]:
    """Return, for each column that the file has, its name there. Prefer our own name to other usual ones.

    Raises:
        CurveError: step or loss is missing, or it is not clear which column holds what.
    """
    columns: dict[Column, str] = {}
    for column, usual in NAMES.items():
        found = [str(column)] if column in names else [name for name in names if letters(name) in usual]
        if len(found) > 1:
            raise CurveError(
                f"{at}: {found[0]!r} and {found[1]!r} may both be the {column}; rename one of them to {column}"
            )
        if found:
            columns[column] = found[0]
        elif column == "grad_norm":
            _refuse_like_norm(at, names)
        else:
            known = ", ".join(map(repr, names[:_MAXIMUM_NAMES])) + ", ..." * (len(names) > _MAXIMUM_NAMES)
            raise CurveError(f"{at}: no column {column}; it names {known}")
    return columns


def _refuse_like_norm(at: str, names: Sequence[str]) -> None:
    """Refuse an unknown name that looks like a gradient norm: unread, the norm would pass whatever its values."""
    for name in names:
        if "gnorm" in letters(name) or ("grad" in letters(name) and "norm" in letters(name)):
            raise CurveError(f"{at}: {name!r} looks like grad_norm; call it grad_norm, or leave it out")


def _without_evaluations(rows: Rows, columns: Mapping[Column, str]) -> Rows:
    """Return the rows without those that Lightning's CSV logger adds to a step for its evaluation, with an empty loss."""
    step, loss = columns["step"], columns["loss"]
    trained = {row.get(step) for _, row in rows if row.get(loss) != ""}
    return [(at, row) for at, row in rows if row.get(loss) != "" or row.get(step) not in trained]


def _check_every_row(rows: Rows, columns: Mapping[Column, str]) -> None:
    """Check that every line has all columns.

    Raises:
        CurveError: a line lacks a column that another one has.
    """
    for column, name in columns.items():
        at = next((at for at, row in rows if name not in row), None)
        if at and column != "grad_norm":
            raise CurveError(f"{at}: no {name}")
        if at:
            other = next(other for other, row in rows if name in row).rpartition(", ")[2]
            raise CurveError(
                f"{at}: no {name}, but {other} has it; leave out such steps of all files, or all gradient norms"
            )


# --- values ---------------------------------------------------------------------------------------------------------


def _step(at: str, row: Mapping[str, Any], name: str) -> int:
    number = _value(at, row, name)
    if not number.is_integer() or abs(number) > 1 << 53:
        raise CurveError(f"{at}: {name} is {_shown(row[name])}, not a whole number")
    return int(number)


def _value(at: str, row: Mapping[str, Any], name: str) -> float:
    value = row[name]
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)) or "_" in str(value):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError) as error:
        raise CurveError(f"{at}: {name} is {_shown(value)}, not a number") from error


def _shown(value: Any) -> str:
    """Return ``value`` as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text):,} characters)"


def _metric(at: str, row: Mapping[str, Any], metric: Metric, name: str) -> float:
    number = _value(at, row, name)
    # Programs write -1 if they computed no norm, and -1 would be equal on both sides.
    if metric == "grad_norm" and -math.inf < number < 0:
        raise CurveError(f"{at}: {name} is {_shown(row[name])}, but no norm is negative; leave {name} out of all files")
    return number


def unit_of(value: Any) -> float:
    """Return the unit of the last digit of a number that :func:`_value` accepts, or 0 if it is not finite."""
    if not math.isfinite(float(value)):
        return 0.0
    try:
        return float(f"1e{Decimal(value).as_tuple().exponent}")
    # An exponent of more than 18 digits. As a float the number is 0.
    except InvalidOperation:
        return 0.0
