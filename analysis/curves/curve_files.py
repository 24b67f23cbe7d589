"""Loss curves of any framework, from CSV or JSON lines, for `python -m analysis.loss`.

Columns or keys are step, loss and optionally grad_norm; others are ignored. A file that begins with a brace holds JSON
lines, as metrics.jsonl does. NaN and the infinities are numbers here; the ladder judges them.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from analysis.records.steps import Floats, Integers, Metric, Steps
from analysis.verdict.curve_difference import METRICS

_MAXIMUM_NAMES = 8
"""How many columns an error names."""
Rows = Sequence[tuple[int, Mapping[str, Any]]]
"""Line numbers, each with its values by column."""


class CurveError(Exception):
    """A file is no curve, or files do not go together. The message names the file, and the line where there is one."""


@dataclass(frozen=True)
class CurveFiles:
    """The curves of both sides by file name, in the order given. Without gradient norms these are NaN, and ``metrics``
    is the loss alone. ``units`` are those of the last printed digits, by file: shape (steps,)."""

    eager: Mapping[str, Steps]
    graphed: Mapping[str, Steps]
    metrics: tuple[Metric, ...]
    units: Mapping[str, Mapping[Metric, Floats]]
    copies: tuple[tuple[str, str], ...]
    """Files with the same bytes as an earlier one, each with that one."""

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
                f"{name}: step {steps.step[at + 1]} follows step {steps.step[at]}; steps must be evenly spaced"
            )
        return steps.step


def read_curves(eager: Sequence[Path], graphed: Sequence[Path]) -> CurveFiles:
    """
    Raises:
        CurveError: a file cannot be read, holds no curve or is given twice, or only some files have gradient norms.
    """
    copies = _find_copies((*eager, *graphed))
    curves = {path: read_curve(path) for path in (*eager, *graphed)}
    with_norm = [path for path, (_, units) in curves.items() if "grad_norm" in units]
    without = [path for path in curves if path not in with_norm]
    if with_norm and without:
        raise CurveError(f"{without[0]}: no grad_norm, but {with_norm[0]} has it; leave it out of all files or of none")
    before, after = ({str(path): curves[path][0] for path in side} for side in (eager, graphed))
    units = {str(path): of_file for path, (_, of_file) in curves.items()}
    return CurveFiles(before, after, METRICS if with_norm else METRICS[:1], units, copies)


def _find_copies(paths: Sequence[Path]) -> tuple[tuple[str, str], ...]:
    """Return each file with the same bytes as an earlier one, with that one: equal runs, or a copy.

    Raises:
        CurveError: one file is given twice, maybe by two names.
    """
    originals: dict[bytes, Path] = {}
    copies = []
    for place, path in enumerate(paths):
        original = originals.setdefault(_read_bytes(path), path)
        if any(path.samefile(earlier) for earlier in paths[:place]):
            raise CurveError(f"{path}: given twice; comparing a run with itself proves nothing")
        if original is not path:
            copies.append((str(path), str(original)))
    return tuple(copies)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CurveError(f"{path}: {error.strerror}") from error


def read_curve(path: Path) -> tuple[Steps, dict[Metric, Floats]]:
    """Return the curve in ``path``, in the order of its lines, and for each of its metrics the units of the last
    printed digits: 0.01 for 2.50. A metric that any line has, all lines have.

    Raises:
        CurveError: the file cannot be read, or holds no curve.
    """
    try:
        text = _read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CurveError(f"{path}: not UTF-8 text (byte {error.start})") from error
    if text.lstrip().startswith("["):
        raise CurveError(f"{path}: a JSON array; write an object a line (JSON lines)")
    rows = list((_json_rows if text.lstrip().startswith("{") else _csv_rows)(path, text))
    if not rows:
        raise CurveError(f"{path}: no step")
    steps = np.array([_step(_at(path, line), row) for line, row in rows], dtype=np.int64)
    metrics = METRICS if _has_norms(path, rows) else METRICS[:1]
    values = {metric: np.array([_value(_at(path, line), row, metric) for line, row in rows]) for metric in metrics}
    units = {metric: np.array([_unit(row[metric]) for _, row in rows]) for metric in metrics}
    none = np.full(len(rows), np.nan)
    tokens, phase = np.zeros(len(rows), dtype=np.int64), np.full(len(rows), "", dtype="U8")
    return Steps(steps, values["loss"], values.get("grad_norm", none), none, tokens, phase), units


def _at(path: Path, line: int) -> str:
    return f"{path}, line {line}"


# --- rows -----------------------------------------------------------------------------------------------------------


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    try:
        for row in filter(None, reader):
            at = _at(path, reader.line_num)
            if not header:
                header = _check_header(at, [name.strip() for name in row])
            elif len(row) != len(header):
                raise CurveError(f"{at}: {len(row)} values, but the header names {len(header)} columns")
            else:
                yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise CurveError(f"{_at(path, reader.line_num)}: {error}") from error


def _check_header(at: str, header: list[str]) -> list[str]:
    missing = next((name for name in ("step", "loss") if name not in header), None)
    if missing:
        names = ", ".join(map(repr, header[:_MAXIMUM_NAMES])) + ", ..." * (len(header) > _MAXIMUM_NAMES)
        raise CurveError(f"{at}: the header has no column {missing}; it names {names}")
    if twice := _find_twice(header):
        raise CurveError(f"{at}: the header names the column {twice} more than once")
    return header


def _find_twice(names: Sequence[str]) -> str | None:
    return next((name for name in ("step", *METRICS) if names.count(name) > 1), None)


class _Digits(str):
    """A number of a JSON line as it was printed."""

    __repr__ = str.__str__


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        at = _at(path, number)
        try:
            # An object becomes a tuple of its pairs: a dict would drop all but the last of a name.
            pairs = json.loads(line, parse_float=_Digits, object_pairs_hook=tuple)
        except (ValueError, RecursionError) as error:
            raise CurveError(f"{at}: not JSON") from error
        if not isinstance(pairs, tuple):
            raise CurveError(f"{at}: not a JSON object")
        if twice := _find_twice([name for name, _ in pairs]):
            raise CurveError(f"{at}: {twice} appears more than once")
        yield number, dict(pairs)


# --- values ---------------------------------------------------------------------------------------------------------


def _has_norms(path: Path, rows: Rows) -> bool:
    """Return whether all lines have a gradient norm.

    Raises:
        CurveError: only some do, or a name looks like grad_norm: ignored norms would pass whatever they are.
    """
    with_norm = [line for line, row in rows if "grad_norm" in row]
    for line, row in rows:
        if with_norm and "grad_norm" not in row:
            raise CurveError(
                f"{_at(path, line)}: no grad_norm, but line {with_norm[0]} has it; leave out such steps of all files, "
                "or all gradient norms"
            )
        alike = None if with_norm else next(filter(_is_like_norm, row), None)
        if alike is not None:
            raise CurveError(f"{_at(path, line)}: {alike!r} looks like grad_norm; call it grad_norm, or leave it out")
    return bool(with_norm)


def _is_like_norm(name: str) -> bool:
    letters = "".join(filter(str.isalpha, name.lower()))
    return "gnorm" in letters or ("grad" in letters and "norm" in letters)


def _step(at: str, row: Mapping[str, Any]) -> int:
    number = _value(at, row, "step")
    if not number.is_integer() or abs(number) > 1 << 53:
        raise CurveError(f"{at}: step is {row['step']!r}, not a whole number")
    return int(number)


def _value(at: str, row: Mapping[str, Any], name: str) -> float:
    if name not in row:
        raise CurveError(f"{at}: no {name}")
    value = row[name]
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)) or "_" in str(value):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise CurveError(f"{at}: {name} is {value!r}, not a number") from error
    # Frameworks write -1 where they computed no norm, the same on both sides.
    if name == "grad_norm" and -math.inf < number < 0:
        raise CurveError(f"{at}: grad_norm is {value!r}, but no norm is negative; leave grad_norm out of all files")
    return number


def _unit(value: Any) -> float:
    """Return the unit of the last digit of a number that :func:`_value` accepts; 0 where it is not finite."""
    if not math.isfinite(float(value)):
        return 0.0
    try:
        return float(f"1e{Decimal(value).as_tuple().exponent}")
    # An exponent of more than 18 digits. As a float the number is 0.
    except InvalidOperation:
        return 0.0
