"""Find out whether compilers work for a program: a sign of life of ranks that print nothing before their first step.

The CPU time of ranks themselves is no such sign, because a rank that waits forever in a collective spins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LOOK_SECONDS = 10.0
BUSY_SHARE = 0.1
"""The share of a core that compilers use while they work. A hundred idle workers of Inductor use less than a hundredth."""
_COMPILER = re.compile(
    r"ptxas|cicc|nvcc|nvlink|fatbinary|cudafe\+\+|ninja|cc1(plus)?|lto1|as|collect2|ld([.-]\w+)*"
    r"|gcc(-[\d.]+)?|g\+\+(-[\d.]+)?|c\+\+|cc|clang(\+\+)?(-[\d.]+)?"
)
"""The names that the kernel shows: at most 15 characters of a program's."""
_INDUCTOR = b"_inductor/compile_worker"
_TICKS = os.sysconf("SC_CLK_TCK")


class CompilerWatch:
    """Watches the compilers among the descendants of process ``ancestor``."""

    def __init__(self, ancestor: int, now: float) -> None:
        self._ancestor, self._looked, self._seconds = ancestor, now, 0.0

    def are_busy(self, now: float) -> bool:
        """Return whether compilers have worked since the last look. Return False until it is time for another look."""
        elapsed = now - self._looked
        if elapsed < LOOK_SECONDS:
            return False
        before, self._seconds, self._looked = self._seconds, compiler_seconds(self._ancestor), now
        # A compiler that has ended takes its seconds along, which shows that it worked, too.
        return abs(self._seconds - before) > BUSY_SHARE * elapsed


def compiler_seconds(ancestor: int) -> float:
    """Return the CPU seconds of all compilers among the descendants of ``ancestor``, and of the children for which they waited."""
    processes = {process.pid: process for process in _processes()}
    return sum(
        process.seconds
        for process in processes.values()
        if _descends(process, ancestor, processes) and _is_compiler(process)
    )


class _Process(NamedTuple):
    pid: int
    name: str
    parent: int
    seconds: float


def _processes() -> Iterator[_Process]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            head, _, tail = (folder / "stat").read_text().rpartition(")")
        except (OSError, UnicodeDecodeError):
            # It has ended.
            continue
        fields = tail.split()
        yield _Process(int(folder.name), head.partition("(")[2], int(fields[1]), sum(map(int, fields[11:15])) / _TICKS)


def _is_compiler(process: _Process) -> bool:
    if _COMPILER.fullmatch(process.name):
        return True
    try:
        return _INDUCTOR in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return False


def _descends(process: _Process, ancestor: int, processes: dict[int, _Process]) -> bool:
    while (parent := process.parent) != ancestor:
        if parent not in processes:
            return False
        process = processes[parent]
    return True
