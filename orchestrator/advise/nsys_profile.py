"""`advise --nsys`: how busy the device is in a profile of Nsight Systems, and what each named range takes.

The tables are those of `nsys export --type sqlite` (Nsight Systems' user guide, SQLite schema reference). A profile lacks the
tables of activities that it did not see. Times in it are nanoseconds.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from analysis.report.sections.tables import table
from launch.common.grouped import grouped
from launch.common.merged_duration import merged_duration
from launch.contract.records.probe import WAITS
from orchestrator.errors import input_error

WINDOW = "measure"
"""The range of the timed steps, which runs with ``profile: nsys`` name."""
MOST_RANGES = 30
WORK_TABLES = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
"""The device's work, each a table CUPTI_ACTIVITY_KIND_<name>. With ``--cuda-graph-trace=graph`` a replay is one row of the last."""
_THREAD_BITS = 24
"""The lowest bits of a global thread id, which number the thread. The others number its process."""
_WORK = "SELECT start, end, deviceId, globalPid >> ?, correlationId FROM "
_CALLS = (
    "SELECT start, end, globalTid >> ?, correlationId, value FROM CUPTI_ACTIVITY_KIND_RUNTIME "
    "JOIN StringIds ON id = nameId ORDER BY start"
)
_RANGES = (
    "SELECT start, end, globalTid >> ?, coalesce(text, value) AS name FROM NVTX_EVENTS LEFT JOIN StringIds ON id = textId "
    "WHERE end IS NOT NULL AND name IS NOT NULL ORDER BY start, end DESC"
)
"""The ranges that have a name and an end, outer ones first. Marks have no end."""
Row = TypeVar("Row")


class Span(NamedTuple):
    start: int
    end: int


@dataclass(frozen=True)
class NamedRanges:
    """All ranges of one name, with numbers left out. ``device_ms`` is the busy time of the work that was launched in them."""

    name: str
    times: int
    host_ms: float
    device_ms: float


@dataclass(frozen=True)
class NsysProfile:
    """What a profile says of its window: the timed steps, or everything from the first to the last work of the device.

    ``busy`` has the share of each device, from 0 to 1. Ranges are those within the window, in the order of the first ones.
    """

    window: str
    milliseconds: float
    busy: Mapping[int, float]
    kernels: int
    replays: int
    waits: int
    wait_ms: float
    ranges: tuple[NamedRanges, ...]


class Work(NamedTuple):
    """A kernel, copy, fill or graph on a device. ``call`` is the call of ``process`` that launched it."""

    start: int
    end: int
    device: int
    process: int
    call: int


class Call(NamedTuple):
    """A call of the CUDA runtime. The work that it launched has its process and its ``id``."""

    start: int
    end: int
    process: int
    id: int
    name: str


class Range(NamedTuple):
    """A named range of one process."""

    start: int
    end: int
    process: int
    name: str


def read_profile(file: Path) -> NsysProfile:
    """Read a profile, or its export to SQLite.

    Raises:
        InputError: the file cannot be read, or it has no work of a device.
    """
    if not file.is_file():
        raise input_error(f"--nsys {file}", "no such file", "name a .nsys-rep file, or its export to .sqlite")
    if file.suffix == ".nsys-rep":
        with tempfile.TemporaryDirectory() as folder:
            return _read_sqlite(_export(file, Path(folder) / "profile.sqlite"), file)
    return _read_sqlite(file, file)


def _export(file: Path, to: Path) -> Path:
    command = ["nsys", "export", "--type", "sqlite", "--output", str(to), str(file)]
    if shutil.which("nsys") is None:
        fix = f"run nsys export --type sqlite {file} where it is installed, and name the .sqlite file"
        raise input_error(f"--nsys {file}", "no nsys is on PATH to read it", fix)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not to.exists():
        raise input_error(f"--nsys {file}", f"nsys export failed: {(done.stderr or done.stdout).strip()}")
    return to


def _read_sqlite(database: Path, file: Path) -> NsysProfile:
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            kinds = {name: f"CUPTI_ACTIVITY_KIND_{name}" for name in WORK_TABLES}
            work = {name: _read(connection, kind, _WORK + kind, Work._make) for name, kind in kinds.items()}
            calls = _read(connection, "CUPTI_ACTIVITY_KIND_RUNTIME", _CALLS, Call._make)
            ranges = _read(connection, "NVTX_EVENTS", _RANGES, Range._make)
    except sqlite3.DatabaseError as error:
        fix = "export it again: nsys export --type sqlite"
        raise input_error(f"--nsys {file}", f"not an export of Nsight Systems: {error}", fix) from None
    if not any(work.values()):
        raise input_error(f"--nsys {file}", "it has no work of a GPU", "profile with --trace=cuda,nvtx")
    return describe_profile(work, calls, ranges)


def _read(connection: sqlite3.Connection, kind: str, query: str, make: Callable[[Iterable[Any]], Row]) -> list[Row]:
    """Return the rows of ``query``, or none if the profile lacks the table ``kind``."""
    is_there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (kind,)).fetchone()
    return [make(row) for row in connection.execute(query, (_THREAD_BITS,))] if is_there else []


# --- what it says ---------------------------------------------------------------------------------------------------


def describe_profile(work: Mapping[str, Sequence[Work]], calls: Sequence[Call], ranges: Sequence[Range]) -> NsysProfile:
    """Describe the ``work`` of devices by kind, and the ``calls`` and ``ranges`` of the host. Both are ordered by time."""
    everything = [one for several in work.values() for one in several]
    timed = next((one for one in ranges if one.name == WINDOW), None)
    whole = Span(min(one.start for one in everything), max(one.end for one in everything))
    window = Span(timed.start, timed.end) if timed else whole
    by_device = grouped((one.device, one) for one in everything)
    waited = [call for call in calls if call.name.startswith(WAITS) and _within(call, window)]
    return NsysProfile(
        WINDOW if timed else "",
        (window.end - window.start) / 1e6,
        {
            device: _busy(several, window) / max(1, window.end - window.start)
            for device, several in sorted(by_device.items())
        },
        sum(_within(one, window) for one in work["KERNEL"]),
        sum(_within(one, window) for one in work["GRAPH_TRACE"]),
        len(waited),
        sum(call.end - call.start for call in waited) / 1e6,
        tuple(_describe_ranges([one for one in ranges if _within(one, window)], calls, everything)),
    )


def _within(one: Work | Call | Range, window: Span) -> bool:
    return window.start <= one.start and one.end <= window.end


def _describe_ranges(ranges: Sequence[Range], calls: Sequence[Call], work: Iterable[Work]) -> Iterator[NamedRanges]:
    launched = grouped(((each.process, each.call), each) for each in work)
    of_process = grouped((call.process, call) for call in calls if (call.process, call.id) in launched)

    def busy(one: Range) -> int:
        known = of_process.get(one.process, [])
        first, end = (bisect_left(known, time, key=attrgetter("start")) for time in (one.start, one.end))
        return _busy([each for call in known[first:end] for each in launched[call.process, call.id]])

    found = grouped((re.sub(r"\d+", "*", one.name), (one.end - one.start, busy(one))) for one in ranges)
    for name, times in found.items():
        host, device = (sum(column) / 1e6 for column in zip(*times, strict=True))
        yield NamedRanges(name, len(times), host, device)


def _busy(work: Iterable[Work], window: Span | None = None) -> int:
    """Return the length of the union of ``work``, in the ``window`` if there is one."""
    if window is None:
        return merged_duration((one.start, one.end) for one in work)
    return merged_duration((max(one.start, window.start), min(one.end, window.end)) for one in work)


# --- as text --------------------------------------------------------------------------------------------------------


def render_profile(file: Path, profile: NsysProfile) -> str:
    """Return the description as Markdown, with a line break at its end."""
    where = f"the range `{profile.window}`" if profile.window else "the time from the first to the last work"
    shares = ", ".join(f"device {device} is idle for {1 - share:.0%}" for device, share in profile.busy.items())
    blocks = [
        f"# Profile {file.name}",
        f"In {where}, {profile.milliseconds:,.1f} ms, {shares}. It ran {profile.kernels:,} kernels and {profile.replays:,} graphs. "
        f"The host waited for the device {profile.waits:,} times, {profile.wait_ms:,.1f} ms in all.",
        "Nsight Systems slows launches down, so an eager step is idle for less than this. The advice on a recipe measures its steps "
        "without a profiler.",
    ]
    if not profile.ranges:
        return "\n\n".join([*blocks, "No named range lies in this time, so it cannot be divided."]) + "\n"
    rows = [
        (f"`{one.name}`", f"{one.times:,}", f"{one.host_ms / one.times:.3f} ms", f"{one.device_ms / one.times:.3f} ms")
        for one in profile.ranges[:MOST_RANGES]
    ]
    blocks.append("Each range contains the ranges within it. Numbers in names are left out:")
    blocks.append(table(("range", "times", "host", "its work on the device"), rows))
    if len(profile.ranges) > MOST_RANGES:
        blocks.append(f"{len(profile.ranges) - MOST_RANGES} more names are not shown.")
    return "\n\n".join(blocks) + "\n"
