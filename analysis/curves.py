"""Loss curves of any framework, from CSV or JSON lines, for `python -m analysis.loss`.

Columns, or keys, are step, loss and optionally grad_norm; others are left aside. A file that begins with a brace holds
JSON lines, as metrics.jsonl does. NaN and the infinities are numbers here, also as the strings that launch.files writes;
whether they may be compared is not for a reader to say. Nothing is filled in, skipped or mended.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from analysis.deviation import METRICS
from analysis.steps import Integers, Metric, Steps


class CurveError(Exception):
    """A file is no curve, or files do not go together. The message names the file, and the line where there is one."""


@dataclass(frozen=True)
class CurveFiles:
    """The curves of both sides by the names of their files, as they were given. Without gradient norms these are NaN,
    and ``metrics`` is the loss alone."""

    eager: Mapping[str, Steps]
    graphed: Mapping[str, Steps]
    metrics: tuple[Metric, ...]

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
    seen: set[Path] = set()
    for path in (*eager, *graphed):
        if path.resolve() in seen:
            raise CurveError(f"{path}: given twice; a run that is compared with itself proves nothing")
        seen.add(path.resolve())
    read = {path: read_curve(path) for path in (*eager, *graphed)}
    with_norm = [path for path, (_, metrics) in read.items() if metrics == METRICS]
    without = [path for path in read if path not in with_norm]
    if with_norm and without:
        raise CurveError(f"{without[0]}: no grad_norm, which {with_norm[0]} has; leave it out of all files or of none")
    before, after = ({str(path): read[path][0] for path in side} for side in (eager, graphed))
    return CurveFiles(before, after, METRICS if with_norm else METRICS[:1])


def read_curve(path: Path) -> tuple[Steps, tuple[Metric, ...]]:
    """The curve in ``path``, in the order of its lines, and the metrics that it has.

    Raises:
        CurveError: the file cannot be read, or holds no curve.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise CurveError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CurveError(f"{path}: not UTF-8 text (byte {error.start})") from error
    read = _json_rows if text.lstrip().startswith("{") else _csv_rows
    rows = list(read(path, text))
    if not rows:
        raise CurveError(f"{path}: no step")
    first = rows[0][1]
    metrics = METRICS if "grad_norm" in first else METRICS[:1]
    steps = np.array([_step(_at(path, line), row) for line, row in rows], dtype=np.int64)
    values = {metric: np.array([_number(_at(path, line), row, metric) for line, row in rows]) for metric in metrics}
    none = np.full(len(rows), np.nan)
    tokens, phase = np.zeros(len(rows), dtype=np.int64), np.full(len(rows), "", dtype="U8")
    return Steps(steps, values["loss"], values.get("grad_norm", none), none, tokens, phase), metrics


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
            raise CurveError(f"{at}: the header has no column {name}; it names {', '.join(map(repr, header))}")
    twice = next((name for name in ("step", *METRICS) if header.count(name) > 1), None)
    if twice:
        raise CurveError(f"{at}: the header names the column {twice} more than once")
    return header


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CurveError(f"{_at(path, number)}: not JSON") from error
        if not isinstance(row, dict):
            raise CurveError(f"{_at(path, number)}: not a JSON object")
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


def _value(at: str, row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise CurveError(f"{at}: no {name}")
    return row[name]
