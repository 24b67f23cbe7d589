"""Read the steps of a run (metrics.jsonl) as arrays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from launch.common.atomic_files import number, parse_json, read_json_lines
from launch.common.regular_file import read_regular
from launch.contract.paths import AttemptPaths
from launch.contract.records.step_metrics import Metric

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

# Possessive quantifiers (++, *+, ?+) match faster. Numbers of up to 18 digits fit in 64 bits.
_INTEGER, _NORM = rb"-?+(?:0|[1-9]\d{0,17}+)", rb"(?:0|[1-9]\d*+)\.\d++(?:e[-+]\d++)?+"
_FLOAT = b"-?+" + _NORM
_LINES = re.compile(
    rb'(?:{"step": %b, "loss": %b, "grad_norm": %b, "step_time_ms": %b, "tokens": %b, "phase": "[a-z]*+"}\n)++'
    % (_INTEGER, _FLOAT, _NORM, _FLOAT, _INTEGER)
)
"""Lines as runs write them, with finite numbers. They are valid JSON with the right types."""
_PUNCTUATION = b'{}":,'
"""Without these, a line of :data:`_LINES` is names and values in turn, with a blank between."""
_COLUMNS = {
    "step": pa.int64(), "loss": pa.float64(), "grad_norm": pa.float64(), "step_time_ms": pa.float64(), "tokens": pa.int64(),
    "phase": pa.string(),
}  # fmt: skip
_BLANKS = csv.ParseOptions(delimiter=" ", quote_char=False)
_VALUES = csv.ConvertOptions(column_types=_COLUMNS, include_columns=[*_COLUMNS])


@dataclass(frozen=True)
class Steps:
    """A run's metrics in the order of writing. Every array has shape (steps,).

    ``loss`` is in nats per token, ``grad_norm`` is before clipping, and times are in milliseconds.
    """

    step: Integers
    loss: Floats
    grad_norm: Floats
    step_time_ms: Floats
    tokens: Integers
    phase: NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.step)

    def of(self, metric: Metric) -> Floats:
        return self.loss if metric == "loss" else self.grad_norm

    def take(self, which: Booleans | Integers | slice) -> Steps:
        return Steps(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def shared_steps(one: Integers, other: Integers) -> tuple[Integers, Integers, Integers]:
    """Return the step numbers that both arrays hold, sorted, and their first places in each."""
    if np.array_equal(one, other) and (one[:-1] < one[1:]).all():
        # Nearly all pairs have the same steps. Sorting both takes twenty times as long as seeing it.
        return one, np.arange(len(one)), np.arange(len(one))
    steps, of_one, of_other = np.intersect1d(one, other, return_indices=True)
    return steps, of_one, of_other


def read_steps(paths: AttemptPaths) -> Steps:
    """Read the complete lines of metrics.jsonl. Return no steps if the file does not exist.

    Raises:
        RecordError: a line before the last is not JSON.
        KeyError, TypeError, ValueError: a line is JSON of another shape.
    """
    try:
        whole = read_regular(paths.metrics).rpartition(b"\n")[0]
    except FileNotFoundError:
        return no_steps()
    # A pattern and Arrow's reader take a third of the time of a JSON parser.
    if _LINES.fullmatch(ended := whole + b"\n"):
        return _read_values(ended.translate(None, _PUNCTUATION))
    try:
        # Parsing the whole file at once is four times as fast as line by line.
        lines = parse_json(b"[" + whole.replace(b"\n", b",") + b"]")
    except ValueError:
        lines = list(read_json_lines(paths.metrics))
    # Convert by columns for speed: a report of two thousand runs reads ten million values.
    columns = {name: [line[name] for line in lines] for name in Steps.__dataclass_fields__}
    return Steps(
        step=_integers(columns["step"]),
        loss=_floats(columns["loss"]),
        grad_norm=_norms(columns["grad_norm"]),
        step_time_ms=_floats(columns["step_time_ms"]),
        tokens=_integers(columns["tokens"]),
        phase=np.array(list(map(str, columns["phase"])), dtype="U8"),
    )


def _read_values(lines: bytes) -> Steps:
    """Return the steps of ``lines``, which are matches of :data:`_LINES` without :data:`_PUNCTUATION`."""
    names = [each for name in _COLUMNS for each in (f"name of {name}", name)]
    in_turn = csv.ReadOptions(use_threads=False, column_names=names)
    table = csv.read_csv(pa.BufferReader(lines), in_turn, _BLANKS, _VALUES)
    step, loss, grad_norm, step_time_ms, tokens, phase = (column.to_numpy() for column in table.columns)
    return Steps(step, loss, grad_norm, step_time_ms, tokens, phase.astype("U8"))


def _integers(values: Sequence[Any]) -> Integers:
    for kind in set(map(type, values)) - {int}:
        raise TypeError(f"{next(value for value in values if type(value) is kind)!r} is not an integer")
    return np.array(values, dtype=np.int64)


def _floats(values: Sequence[Any]) -> Floats:
    # NumPy would read None as NaN.
    plain = set(map(type, values)) <= {float, int}
    return np.array(values if plain else list(map(number, values)), dtype=np.float64)


def _norms(values: Sequence[Any]) -> Floats:
    norms = _floats(values)
    # Programs write -1 if they computed no norm, and -1 would be equal on both sides.
    for place in np.flatnonzero(norms < 0):
        raise ValueError(f"grad_norm is {values[int(place)]!r}, but no norm is negative")
    return norms


def no_steps() -> Steps:
    integers, floats = np.empty(0, np.int64), np.empty(0, np.float64)
    return Steps(integers, floats, floats, floats, integers, np.empty(0, "U8"))
