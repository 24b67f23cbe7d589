"""Read the steps of a run (metrics.jsonl) as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from launch.common.atomic_files import number, parse_json, read_json_lines
from launch.common.regular_file import read_regular
from launch.contract.paths import AttemptPaths

Metric = Literal["loss", "grad_norm"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


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
    # Programs write -1 if they computed no norm, which would be equal on both sides.
    for place in np.flatnonzero(norms < 0):
        raise ValueError(f"grad_norm is {values[int(place)]!r}, but no norm is negative")
    return norms


def no_steps() -> Steps:
    integers, floats = np.empty(0, np.int64), np.empty(0, np.float64)
    return Steps(integers, floats, floats, floats, integers, np.empty(0, "U8"))
