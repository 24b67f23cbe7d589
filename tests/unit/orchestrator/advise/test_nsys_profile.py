"""Test what is read from a profile of Nsight Systems, in a database with the tables that its user guide documents."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.advise.nsys_profile import NamedRanges, read_profile, render_profile
from orchestrator.cli.main import main
from orchestrator.errors import InputError

PROCESS, OTHER = 7, 8
MS = 1_000_000
_DEVICE = (
    "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, streamId INTEGER NOT "
    "NULL, correlationId INTEGER, globalPid INTEGER"
)
SCHEMA = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_DEVICE}, demangledName INTEGER, graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_DEVICE}, bytes INTEGER, copyKind INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_DEVICE}, graphId INTEGER, graphExecId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER, textId INTEGER",
}
STRINGS = {1: "cudaLaunchKernel_v7000", 2: "cudaStreamSynchronize_v3020", 3: "cudaGraphLaunch_v10000", 4: "layer 12"}


class Profile:
    """A database that is written as an export. Times are milliseconds. Tables without rows are absent."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Sequence[Any]]] = {}
        self._calls = 0

    def add(self, table: str, *row: Any) -> None:
        self.rows.setdefault(table, []).append(row)

    def call(self, start: float, end: float, name: int = 1, process: int = PROCESS, thread: int = 1) -> int:
        self._calls += 1
        thread_id = (process << 24) + thread
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", int(start * MS), int(end * MS), 0, thread_id, self._calls, name, 0)
        return self._calls

    def work(self, kind: str, start: float, end: float, call: int, process: int = PROCESS, device: int = 0) -> None:
        self.add(f"CUPTI_ACTIVITY_KIND_{kind}", int(start * MS), int(end * MS), device, 1, 7, call, process << 24, 0, 0)

    def named(self, name: str | int, start: float, end: float | None) -> None:
        text, text_id = (name, None) if isinstance(name, str) else (None, name)
        ends = None if end is None else int(end * MS)
        self.add("NVTX_EVENTS", int(start * MS), ends, 59 if ends else 34, text, (PROCESS << 24) + 1, text_id)

    def write(self, file: Path) -> Path:
        with closing(sqlite3.connect(file)) as connection:
            tables: dict[str, list[Sequence[Any]]] = {"StringIds": list(STRINGS.items()), **self.rows}
            for table, rows in tables.items():
                connection.execute(f"CREATE TABLE {table} ({SCHEMA[table]})")
                connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' for _ in rows[0])})", rows)
            connection.commit()
        return file


def steps(profile: Profile) -> None:
    """Write two steps of 10 ms in the range of the timed steps, from 100 to 120 ms, and a step of the warm-up."""
    for number, start in ((0, 50), (1, 100), (2, 110)):
        profile.named(f"step {number}", start, start + 10)
        profile.named(4, start + 1, start + 3)
        # Another thread of the process launches the backward pass.
        forward, backward = profile.call(start + 1, start + 2), profile.call(start + 4, start + 5, thread=2)
        profile.work("KERNEL", start + 2, start + 4, forward)
        profile.work("KERNEL", start + 3, start + 6, backward)
        profile.call(start + 6, start + 9, name=2)
    profile.named("measure", 100, 120)
    profile.named("a mark", 105, None)


def test_the_timed_steps_are_the_window(tmp_path: Path) -> None:
    profile = Profile()
    steps(profile)
    found = read_profile(profile.write(tmp_path / "rank0.sqlite"))
    assert (found.window, found.milliseconds) == ("measure", 20.0)
    assert found.busy == {0: pytest.approx(8 / 20)}, "kernels that overlap count once"
    assert (found.kernels, found.replays, found.waits, found.wait_ms) == (4, 0, 2, 6.0)
    assert found.ranges == (
        NamedRanges("measure", 1, 20.0, 8.0), NamedRanges("step *", 2, 20.0, 8.0), NamedRanges("layer *", 2, 4.0, 4.0)
    )  # fmt: skip
    text = render_profile(Path("rank0.sqlite"), found)
    assert "In the range `measure`, 20.0 ms, device 0 is idle for 60%. It ran 4 kernels and 0 graphs." in text
    assert "The host waited for the device 2 times, 6.0 ms in all." in text
    assert "| `step *` | 2 | 10.000 ms | 4.000 ms |" in text and "a mark" not in text


def test_a_replay_is_work_of_the_device(tmp_path: Path) -> None:
    profile = Profile()
    profile.named("step 1", 0, 10)
    profile.work("GRAPH_TRACE", 2, 8, profile.call(1, 2, name=3))
    profile.work("MEMCPY", 9, 10, profile.call(8, 9))
    found = read_profile(profile.write(tmp_path / "a.sqlite"))
    assert (found.window, found.milliseconds, found.kernels, found.replays) == ("", 8.0, 0, 1)
    assert found.busy == {0: pytest.approx(7 / 8)}
    text = render_profile(Path("a.sqlite"), found)
    assert "In the time from the first to the last work, 8.0 ms" in text and "No named range lies in this time" in text


def test_work_of_another_process_or_device_is_its_own(tmp_path: Path) -> None:
    profile = Profile()
    profile.named("measure", 0, 10)
    profile.work("KERNEL", 1, 3, profile.call(1, 2))
    call = profile.call(2, 3, process=OTHER)
    profile.work("KERNEL", 4, 9, call, process=OTHER, device=1)
    found = read_profile(profile.write(tmp_path / "a.sqlite"))
    assert found.busy == {0: pytest.approx(0.2), 1: pytest.approx(0.5)}
    assert found.ranges == (NamedRanges("measure", 1, 10.0, 2.0),)


def test_a_profile_without_a_device_is_refused(tmp_path: Path) -> None:
    profile = Profile()
    profile.named("measure", 0, 10)
    with pytest.raises(InputError, match="no work of a GPU"):
        read_profile(profile.write(tmp_path / "a.sqlite"))
    (tmp_path / "b.sqlite").write_text("not a database, whatever its name says")
    with pytest.raises(InputError, match="not an export of Nsight Systems"):
        read_profile(tmp_path / "b.sqlite")
    with pytest.raises(InputError, match="no such file"):
        read_profile(tmp_path / "c.sqlite")


def test_nsys_exports_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script stands in for nsys. It copies a database that is already there."""
    profile = Profile()
    steps(profile)
    exported = profile.write(tmp_path / "exported")
    report = tmp_path / "rank0.nsys-rep"
    report.write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["advise", "--nsys", str(report)]) == 1
    assert f"run nsys export --type sqlite {report} where it is installed" in capsys.readouterr().err
    for text, code in (
        (f'test "$1 $2 $3" = "export --type sqlite" && /bin/cp {exported} "$5"', 0),
        ("echo odd >&2; exit 3", 1),
    ):
        (tmp_path / "nsys").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "nsys").chmod(0o755)
        assert main(["advise", "--nsys", str(report)]) == code
        said = capsys.readouterr()
        assert "device 0 is idle for 60%" in said.out if code == 0 else "nsys export failed: odd" in said.err


@pytest.mark.parametrize("words", [["name=other"], ["--json"], ["--only", "engine=megatron"]])
def test_a_profile_takes_no_option_of_a_recipe(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--nsys", "a.sqlite", *words]) == 1
    assert "--nsys: takes one file, and neither --json, --only nor key=value" in capsys.readouterr().err
