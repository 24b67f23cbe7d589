"""Read the scalars of a TensorBoard event file without TensorBoard. The file holds framed protocol buffers.

A record consists of its length (8 bytes), a checksum (4 bytes), an Event and a checksum (4 bytes). Field 2 of an Event is the
step, and field 5 the summary. A summary's values (field 1) have a tag (1) and a number (2), or a tensor (8) of one element.
Numbers are float32, or doubles in a tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from analysis.curves.curve import MOST_BYTES, CurveError, Row
from launch.common.regular_file import read_regular
from launch.contract.metric_names import column_of

_FIXED = {1: 8, 5: 4}
"""The size of a field in bytes, by its wire type."""


def read_events(path: Path) -> Iterator[Row]:
    """Yield the scalars of each step by tag.

    Raises:
        CurveError: the file cannot be read, or is damaged before its last record.
    """
    steps: dict[int, dict[str, float]] = {}
    try:
        for event in _records(read_regular(path, MOST_BYTES)):
            fields = list(_fields(event))
            step = next((value for number, value in fields if number == 2 and isinstance(value, int)), 0)
            for summary in (value for number, value in fields if number == 5 and isinstance(value, bytes)):
                scalars, known = _scalars(summary), steps.setdefault(step, {})
                if again := [tag for tag in scalars if tag in known and column_of(tag)]:
                    raise CurveError(
                        f"{path}: {again[0]} appears twice at step {step}; a restarted run needs a file of its own"
                    )
                known.update(scalars)
    except OSError as error:
        raise CurveError(f"{path}: {error.strerror}") from error
    except (IndexError, ValueError, struct.error) as error:
        raise CurveError(f"{path}: no event file of TensorBoard, or damaged") from error
    return ((f"{path}, step {step}", {"step": step, **found}) for step, found in sorted(steps.items()) if found)


def _records(content: bytes) -> Iterator[bytes]:
    """Yield whole records. A program that was killed leaves the last one torn."""
    place = 0
    while place + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        if place + 16 + length > len(content):
            return
        yield content[place + 12 : place + 12 + length]
        place += 16 + length


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield each field of a protocol buffer: its number, and an integer or its bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if kind == 2:
            length, place = _varint(message, place)
        elif kind in _FIXED:
            length = _FIXED[kind]
        else:
            raise ValueError(f"wire type {kind}")
        if place + length > len(message):
            raise ValueError("a field ends behind its message")
        yield key >> 3, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place


def _scalars(summary: bytes) -> dict[str, float]:
    found: dict[str, float] = {}
    for value in (value for number, value in _fields(summary) if number == 1 and isinstance(value, bytes)):
        fields = {number: content for number, content in _fields(value) if isinstance(content, bytes)}
        number = _number(fields)
        if 1 in fields and number is not None:
            found[fields[1].decode()] = number
    return found


def _number(value: dict[int, bytes]) -> float | None:
    if 2 in value:
        return float(struct.unpack("<f", value[2])[0])
    tensor = dict(_fields(value[8])) if 8 in value else {}
    # tensor_content, float_val and double_val of one element.
    for field in (4, 5, 6):
        content = tensor.get(field)
        if isinstance(content, bytes) and len(content) in (4, 8):
            return float(struct.unpack("<f" if len(content) == 4 else "<d", content)[0])
    return None
