"""Test reading metrics.jsonl: on lines as runs write them, the pattern finds the same values and the same damage as the
JSON parser."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from analysis.records.steps import read_steps, shared_steps
from launch.common.atomic_files import dumps
from launch.contract.paths import AttemptPaths
from launch.contract.records.step_metrics import StepMetrics

NUMBERS = (0.0, 5e-324, 1e-05, 0.1 + 0.2, 5.485764026641846, 123456789.12345678, 1e16, 1.7976931348623157e308)
LINES = [dumps(StepMetrics(step, -size, size, size, 10**step, "measure")).encode() for step, size in enumerate(NUMBERS)]
PIECES = (b'"loss": ', b'{"step": ', b"tokens", b".", b"1.0", b"e-05", b'"measure"', b"}")
REPLACEMENTS = (b"", b"0", b"-", b"1e", b" ", b"NaN", b'"NaN"', b"null", b"true", b".,", b"\xff", b"\0", b"[", b"\n")


def outcome(folder: Path, lines: list[bytes]) -> list[object]:
    """Return the bytes of the columns, or the error with the damage that it names."""
    attempt = AttemptPaths(folder)
    attempt.metrics.write_bytes(b"".join(line + b"\n" for line in lines))
    try:
        steps = read_steps(attempt)
    except Exception as error:
        return [type(error), str(error)]
    return [(array.dtype, array.tobytes()) for array in vars(steps).values()]


def as_json(line: bytes) -> bytes:
    """Return the same JSON with a space at the end, which only the parser reads."""
    return line + b" "


def damaged(line: bytes, seed: int) -> bytes:
    """Return ``line`` with one piece or byte replaced."""
    chance = random.Random(seed)
    piece = chance.choice([*PIECES, bytes([chance.choice(line)])])
    return line.replace(piece, chance.choice([piece + b"0", b"0" + piece, *REPLACEMENTS]), 1)


def test_every_float_is_read_to_the_bit(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path)
    attempt.metrics.write_bytes(b"\n".join([*LINES, b'{"step": torn']))
    assert read_steps(attempt).loss.tolist() == [-number for number in NUMBERS]
    assert outcome(tmp_path, LINES) == outcome(tmp_path, [*map(as_json, LINES)])
    assert np.array_equal(read_steps(attempt).tokens, 10 ** np.arange(len(NUMBERS)))


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_damage_is_found_as_by_the_json_parser(tmp_path: Path, start: int) -> None:
    for seed in range(start, start + 100):
        line = damaged(LINES[seed % len(LINES)], seed)
        found, expected = (outcome(tmp_path, [line, other, line]) for other in (LINES[0], as_json(LINES[0])))
        assert found == expected, line


@pytest.mark.parametrize("number", ["00.5", "0.", "-0.5e", "1.0e5", "+1.0", "1.0E-05", "-01.0", "1_0.0", "1e999"])
def test_a_number_that_no_run_writes_is_left_to_the_json_parser(tmp_path: Path, number: str) -> None:
    line = LINES[4].replace(b"5.485764026641846", number.encode())
    assert outcome(tmp_path, [line]) == outcome(tmp_path, [as_json(line)])


def test_an_integer_beyond_64_bits_is_named(tmp_path: Path) -> None:
    line = LINES[0].replace(b'"step": 0', b'"step": 9223372036854775808')
    assert outcome(tmp_path, [line])[0] is OverflowError


@pytest.mark.parametrize("other", [[0, 1, 2, 5], [1, 2, 5], [0, 1, 1, 2, 5], [5, 2, 1, 0], [7], []])
@pytest.mark.parametrize("one", [[0, 1, 2, 5], [0, 1, 1, 2, 5], [5, 2, 1, 0], []])
def test_shared_steps_are_those_of_numpy(one: list[int], other: list[int]) -> None:
    sides = [np.array(side, dtype=np.int64) for side in (one, other)]
    for found, expected in zip(shared_steps(*sides), np.intersect1d(*sides, return_indices=True), strict=True):
        assert found.tolist() == expected.tolist() and found.dtype == expected.dtype
