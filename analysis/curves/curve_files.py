"""Loss curves of any framework, from CSV or JSON lines, for `python -m analysis.loss`.

Columns, or keys, are step, loss and optionally grad_norm; others are left aside. A file that begins with a brace holds
JSON lines, as metrics.jsonl does. NaN and the infinities are numbers here, also as the strings that
launch.common.atomic_files writes; whether they may be compared is not for a reader to say. Nothing is filled in,
skipped or mended, and a name that is only like grad_norm is refused: gradient norms that are left aside unseen would
pass whatever they are.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from analysis.records.steps import Floats, Integers, Metric, Steps
from analysis.verdict.curve_difference import METRICS

_NAMED = 8
"""How many columns an error names."""


class CurveError(Exception):
    """A file is no curve, or files do not go together. The message names the file, and the line where there is one."""


@dataclass(frozen=True)
class CurveFiles:
    """The curves of both sides by the names of their files, as they were given. Without gradient norms these are NaN,
    and ``metrics`` is the loss alone. ``units`` are those of the last printed digits, by file: shape (steps,)."""

    eager: Mapping[str, Steps]
    graphed: Mapping[str, Steps]
    metrics: tuple[Metric, ...]
    units: Mapping[str, Mapping[Metric, Floats]]
    copies: tuple[tuple[str, str], ...]
    """Files of the same bytes as an earlier one, each with that one."""

    @property
    def steps(self) -> Integers:
        """The steps that every file should have: those of the longest, which are evenly spaced.

        Raises:
            CurveError: they are not.
        """
        name, steps = max({**self.eager, **self.graphed}.items(), key=lambda item: len(item[1]))
        strides = np.diff(steps.step)
        odd = np.flatnonzero((strides != np.median(strides)) | (strides <= 0)) if strides.size else strides
        if odd.size:
            at = int(odd[0])
            raise CurveError(
                f"{name}: step {steps.step[at + 1]} follows step {steps.step[at]}; steps are evenly spaced"
            )
        return steps.step


def read_curves(eager: Sequence[Path], graphed: Sequence[Path]) -> CurveFiles:
    """
    Raises:
        CurveError: a file cannot be read, holds no curve or is given twice, or only some files have gradient norms.
    """
    copies = _copies((*eager, *graphed))
    read = {path: read_curve(path) for path in (*eager, *graphed)}
    with_norm = [path for path, (_, units) in read.items() if "grad_norm" in units]
    without = [path for path in read if path not in with_norm]
    if with_norm and without:
        raise CurveError(f"{without[0]}: no grad_norm, which {with_norm[0]} has; leave it out of all files or of none")
    before, after = ({str(path): read[path][0] for path in side} for side in (eager, graphed))
    units = {str(path): found for path, (_, found) in read.items()}
    return CurveFiles(before, after, METRICS if with_norm else METRICS[:1], units, copies)


def _copies(paths: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """Files of the same bytes as an earlier one, each with that one: runs that are equal to the bit, or a copy.

    Raises:
        CurveError: one file is given under two names.
    """
    seen: dict[tuple[int, int], Path] = {}
    contents: dict[bytes, Path] = {}
    found = []
    for path in paths:
        content = _bytes(path)
        stat = path.stat()
        if (stat.st_dev, stat.st_ino) in seen:
            raise CurveError(f"{path}: given twice; a run that is compared with itself proves nothing")
        seen[stat.st_dev, stat.st_ino] = path
        if content in contents:
            found.append((str(path), str(contents[content])))
        contents.setdefault(content, path)
    return tuple(found)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CurveError(f"{path}: {error.strerror}") from error


def read_curve(path: Path) -> tuple[Steps, dict[Metric, Floats]]:
    """The curve in ``path``, in the order of its lines, and the metrics that it has, each with the units of its last
    printed digits: 0.01 for 2.50. A metric that any line has, all lines have.

    Raises:
        CurveError: the file cannot be read, or holds no curve.
    """
    try:
        text = _bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CurveError(f"{path}: not UTF-8 text (byte {error.start})") from error
    if text.lstrip().startswith("["):
        raise CurveError(f"{path}: a JSON array; write an object a line (JSON lines)")
    read = _json_rows if text.lstrip().startswith("{") else _csv_rows
    rows = list(read(path, text))
    if not rows:
        raise CurveError(f"{path}: no step")
    metrics = METRICS if _has_norms(path, rows) else METRICS[:1]
    steps = np.array([_step(_at(path, line), row) for line, row in rows], dtype=np.int64)
    values = {metric: np.array([_number(_at(path, line), row, metric) for line, row in rows]) for metric in metrics}
    units = {metric: np.array([_unit(row[metric]) for _, row in rows]) for metric in metrics}
    _check_norms(path, rows, values)
    none = np.full(len(rows), np.nan)
    tokens, phase = np.zeros(len(rows), dtype=np.int64), np.full(len(rows), "", dtype="U8")
    return Steps(steps, values["loss"], values.get("grad_norm", none), none, tokens, phase), units


def _has_norms(path: Path, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> bool:
    with_norm = next((line for line, row in rows if "grad_norm" in row), None)
    if with_norm is None:
        for line, row in rows:
            alike = next((name for name in row if _is_like_norm(name)), None)
            if alike is not None:
                raise CurveError(f"{_at(path, line)}: {alike!r} is like grad_norm; call it grad_norm, or leave it out")
        return False
    without = next((line for line, row in rows if "grad_norm" not in row), None)
    if without is not None:
        raise CurveError(
            f"{_at(path, without)}: no grad_norm, which line {with_norm} has; leave out such steps of all files, or all "
            "gradient norms"
        )
    return True


def _check_norms(path: Path, rows: Sequence[tuple[int, Mapping[str, Any]]], values: Mapping[Metric, Floats]) -> None:
    """A negative norm is none: frameworks write -1 where they computed nothing, which is the same on both sides."""
    norms = values.get("grad_norm", np.zeros(0))
    negative = np.flatnonzero((norms < 0) & np.isfinite(norms))
    if negative.size:
        line, row = rows[int(negative[0])]
        raise CurveError(
            f"{_at(path, line)}: grad_norm is {row['grad_norm']!r}, and no norm is negative; leave grad_norm out of all files"
        )


def _is_like_norm(name: str) -> bool:
    letters = "".join(filter(str.isalpha, name.lower()))
    return "gnorm" in letters or ("grad" in letters and "norm" in letters)


def _at(path: Path, line: int) -> str:
    return f"{path}, line {line}"


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and rows by column. Lines without a character are left out."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    try:
        for row in reader:
            if not row:
                continue
            if not header:
                header = _header(_at(path, reader.line_num), row)
            elif len(row) != len(header):
                at = _at(path, reader.line_num)
                raise CurveError(f"{at}: {len(row)} values, and the header names {len(header)} columns")
            else:
                yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise CurveError(f"{_at(path, reader.line_num)}: {error}") from error


def _header(at: str, row: Sequence[str]) -> list[str]:
    header = [name.strip() for name in row]
    for name in ("step", "loss"):
        if name not in header:
            named = ", ".join(map(repr, header[:_NAMED])) + ", ..." * (len(header) > _NAMED)
            raise CurveError(f"{at}: the header has no column {name}; it names {named}")
    twice = next((name for name in ("step", *METRICS) if header.count(name) > 1), None)
    if twice:
        raise CurveError(f"{at}: the header names the column {twice} more than once")
    return header


class _Digits(str):
    """A number of a JSON line as it was printed."""

    __repr__ = str.__str__


class _Pairs(dict[str, Any]):
    """A JSON object; ``twice`` are the names that it has more than once, of which a dict keeps the last."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = {name for name, count in Counter(name for name, _ in pairs).items() if count > 1}


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_float=_Digits, object_pairs_hook=_Pairs)
        except (ValueError, RecursionError) as error:
            raise CurveError(f"{_at(path, number)}: not JSON") from error
        if not isinstance(row, _Pairs):
            raise CurveError(f"{_at(path, number)}: not a JSON object")
        twice = next((name for name in ("step", *METRICS) if name in row.twice), None)
        if twice:
            raise CurveError(f"{_at(path, number)}: {twice} is there more than once")
        yield number, row


def _step(at: str, row: Mapping[str, Any]) -> int:
    value = _value(at, row, "step")
    number = _number(at, row, "step")
    if not number.is_integer() or abs(number) > 1 << 53:
        raise CurveError(f"{at}: step is {value!r}, not a whole number")
    return int(number)


def _number(at: str, row: Mapping[str, Any], name: str) -> float:
    value = _value(at, row, name)
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)) or "_" in str(value):
            raise ValueError
        return float(value)
    except (ValueError, OverflowError) as error:
        raise CurveError(f"{at}: {name} is {value!r}, not a number") from error


def _unit(value: Any) -> float:
    """Of the last digit of what _number took for a number; 0 where that is not finite."""
    if not math.isfinite(float(value)):
        return 0.0
    try:
        return float(f"1e{Decimal(value).as_tuple().exponent}")
    except InvalidOperation:  # an exponent of more than 18 digits: a float takes the number for 0
        return 0.0


def _value(at: str, row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise CurveError(f"{at}: no {name}")
    return row[name]
