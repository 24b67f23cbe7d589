"""Test how records reach the disk: whole or not at all. Growing files may only lack a torn last line."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.common.atomic_files import (
    JsonLines,
    RecordError,
    atomic_open,
    dumps,
    encode,
    iter_json_object,
    number,
    read_json,
    read_json_lines,
    write_json,
    write_text,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
PROPERTY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(value=VALUES)
def test_what_is_written_is_read_back(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "deep" / "r.json", value)
    assert read_json(tmp_path / "deep" / "r.json") == encode(value)


@given(st.floats())
def test_a_number_survives_to_the_last_bit_whether_finite_or_not(value: float) -> None:
    back = number(json.loads(dumps(value)))
    assert back == value or (math.isnan(back) and math.isnan(value))
    assert math.copysign(1, back) == math.copysign(1, value) or math.isnan(value)


def test_what_is_no_number_is_a_string_no_reader_refuses() -> None:
    text = dumps({"a": math.nan, "b": [math.inf, -math.inf]})
    refuse = pytest.fail
    assert json.loads(text, parse_constant=refuse) == {"a": "NaN", "b": ["Infinity", "-Infinity"]}


@PROPERTY
@given(text=st.text(st.characters(), max_size=9).map(lambda text: f"{text}\ud800 half"))
def test_half_a_surrogate_pair_is_written_and_read_back(tmp_path: Path, text: str) -> None:
    """A message may contain it if its bytes were not UTF-8 (PEP 383)."""
    write_json(tmp_path / "r.json", {"message": text})
    # Two adjacent halves form one character, because JSON spells both in the same way.
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert read_json(tmp_path / "r.json") == {"message": expected}
    with JsonLines(tmp_path / "m.jsonl") as lines:
        lines.write({"message": text})
    assert list(read_json_lines(tmp_path / "m.jsonl"))[-1] == {"message": expected}
    write_text(tmp_path / "r.txt", text)
    assert (tmp_path / "r.txt").read_bytes().decode().endswith("\\ud800 half")


def test_writing_leaves_nothing_beside_the_file(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write_text(tmp_path / "r.txt", text)
    assert [path.name for path in tmp_path.iterdir()] == ["r.txt"]
    assert (tmp_path / "r.txt").read_text() == "second"


def test_an_error_names_the_file_that_was_asked_for() -> None:
    with pytest.raises(OSError, match=r"'/proc/r\.txt'$"):
        write_text(Path("/proc/r.txt"), "x")


def _write_many(path: Path, letter: str) -> None:
    for _ in range(30):
        write_text(path, letter * 20_000)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    write_text(path, "a" * 20_000)
    writers = [multiprocessing.get_context("fork").Process(target=_write_many, args=(path, letter)) for letter in "bc"]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        text = path.read_text()
        assert len(text) == 20_000
        assert len(set(text)) == 1
    assert [writer.exitcode for writer in writers] == [0, 0]


def test_a_growing_file_is_read_to_its_last_whole_line_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as lines:
        for step in range(3):
            lines.write({"step": step, "loss": 0.1 + step, "text": "ä\n"})
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == 3
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        read = list(read_json_lines(path))
        assert [line["step"] for line in read] == list(range(sum(end <= cut for end in ends)))


def test_a_line_is_on_disk_before_the_file_is_closed_and_is_added_to_later(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.jsonl"
    lines = JsonLines(path)
    lines.write({"step": 0})
    assert list(read_json_lines(path)) == [{"step": 0}]
    lines.__exit__(None, None, None)
    with JsonLines(path) as again:
        again.write({"step": 1})
    assert list(read_json_lines(path)) == [{"step": 0}, {"step": 1}]


def test_damage_before_the_last_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    with pytest.raises(RecordError, match=r"m\.jsonl: line 2 is not JSON"):
        list(read_json_lines(path))


def test_a_file_that_is_not_there_has_no_lines_and_is_no_json(tmp_path: Path) -> None:
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"a": ')
    with pytest.raises(RecordError, match=r"half\.json: not JSON"):
        read_json(tmp_path / "half.json")


@PROPERTY
@given(content=st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_an_object_comes_piece_by_piece_and_whole(content: dict[str, Any]) -> None:
    assert json.loads("".join(iter_json_object(content))) == encode(content)
    streamed = {name: iter(value) if isinstance(value, list) else value for name, value in content.items()}
    assert "".join(iter_json_object(streamed)) == "".join(iter_json_object(content))


def test_a_file_that_is_not_finished_takes_no_place(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), atomic_open(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_a_line_that_a_writer_left_torn_does_not_spoil_the_next_writer_s(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"b": ')
    with JsonLines(path) as lines:
        lines.write({"c": 3})
    assert list(read_json_lines(path)) == [{"a": 1}, {"c": 3}]
