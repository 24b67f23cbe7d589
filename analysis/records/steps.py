"""Read the steps of a run (metrics.jsonl) as arrays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from launch.common.atomic_files import number, parse_json, read_json_lines
from launch.common.regular_file import read_regular
from launch.contract.paths import AttemptPaths
from launch.contract.records.step_metrics import Metric

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

# Possessive quantifiers (++, *+, ?+) match faster. Numbers of up to 18 digits fit in 64 bits.
_INTEGER, _NORM = rb"(-?+(?:0|[1-9]\d{0,17}+))", rb"((?:0|[1-9]\d*+)\.\d++(?:e[-+]\d++)?+)"
_FLOAT = b"(-?+" + _NORM[1:]
_LINE = re.compile(
    rb'^{"step": %b, "loss": %b, "grad_norm": %b, "step_time_ms": %b, "tokens": %b, "phase": "([a-z]*+)"}$'
    % (_INTEGER, _FLOAT, _NORM, _FLOAT, _INTEGER),
    re.MULTILINE,
)
"""A line as runs write it, with finite numbers. It is valid JSON with the right types."""


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
    # A pattern and Arrow's conversion read lines in half the time of a JSON parser.
    if len(found := _LINE.findall(whole)) == whole.count(b"\n") + 1:
        return _convert(found)
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


def _convert(lines: Sequence[tuple[bytes, ...]]) -> Steps:
    """Return the steps of ``lines``, which are matches of :data:`_LINE`."""
    step, loss, grad_norm, step_time_ms, tokens, phase = zip(*lines, strict=True)
    integers = pa.array(step + tokens, pa.string()).cast(pa.int64()).to_numpy().reshape(2, -1)
    floats = pa.array(loss + grad_norm + step_time_ms, pa.string()).cast(pa.float64()).to_numpy().reshape(3, -1)
    return Steps(integers[0], floats[0], floats[1], floats[2], integers[1], np.array(phase, "S8").astype("U8"))


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
