"""One attempt's ranks, watched until they end or have to be ended, and what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

from launch.failures import Diagnosis, EndedBy, Evidence, RankException, RankExit, diagnose
from launch.files import RecordError, read_json
from launch.process import start
from launch.record import AttemptPaths, Limits, Outcome, read_events
from launch.redact import redact

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""Between asking processes to end and ending them."""
STACKS_SECONDS = 1.0
"""For ranks to print their stacks."""


class Ranks:
    """The ranks of one attempt, under launch.ranks."""

    def __init__(self, attempt: AttemptPaths, limits: Limits, environment: Mapping[str, str]) -> None:
        self._attempt = attempt
        self._limits = limits
        self._started = time.time()
        self._oom_kills = _oom_kills()
        self._ranks = start("launch.ranks", (str(attempt.root),), environment, attempt.logs / "launcher.log")

    def supervise(self, allocation: str, cancelled: Callable[[], bool]) -> Outcome:
        """Wait for the ranks, or end them when the time, their silence or ``cancelled`` says so."""
        ended_by = self._watch(cancelled)
        # Before anything is ended here: what becomes of ranks after that is no cause.
        events, exits = self._events(), self._exits()
        if ended_by == "hang":
            self._print_stacks(events)
        if ended_by != "itself":
            self._end_ranks()
        diagnosis = diagnose(self._evidence(ended_by, events, exits))
        return outcome_of(diagnosis, allocation, self._started, self._ranks.returncode)

    def _watch(self, cancelled: Callable[[], bool]) -> EndedBy:
        begun = last_sign = time.monotonic()
        size = -1
        while self._ranks.poll() is None:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if (grown := self._record_bytes()) != size:
                size, last_sign = grown, now
            if cancelled():
                return "cancel"
            if now - begun > self._limits.run_seconds:
                return "deadline"
            if now - last_sign > self._limits.hang_seconds:
                return "hang"
        return "itself"

    def _record_bytes(self) -> int:
        """Bytes in the files that ranks write: the run's heartbeat."""
        files = [self._attempt.metrics, *(self._attempt.root / "events").glob("rank*.jsonl")]
        return sum(path.stat().st_size for path in files if path.exists())

    def _events(self) -> dict[int, list[dict[str, Any]]]:
        """What each rank has recorded, by rank, as far as it can be read."""
        found: dict[int, list[dict[str, Any]]] = {}
        for path in sorted((self._attempt.root / "events").glob("rank*.jsonl")):
            rank = int(path.stem.removeprefix("rank"))
            found[rank] = []
            # The report names a record that is damaged; here it must not end the supervision.
            with contextlib.suppress(RecordError):
                found[rank].extend(read_events(self._attempt, rank))
        return found

    def _print_stacks(self, events: Mapping[int, list[dict[str, Any]]]) -> None:
        """SIGABRT makes each rank's faulthandler write its stack to the rank's log."""
        for lines in events.values():
            pid = lines[0].get("pid") if lines else None
            if pid is not None and _parent(pid) == self._ranks.pid:
                os.kill(pid, signal.SIGABRT)
                os.kill(pid, signal.SIGCONT)  # a process that is stopped cannot print
        time.sleep(STACKS_SECONDS)

    def _end_ranks(self) -> None:
        self._ranks.terminate()
        try:
            self._ranks.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._ranks.kill()  # its ranks follow it (launch.lifeline)
            self._ranks.wait()

    def _exits(self) -> tuple[RankExit, ...]:
        try:
            return tuple(RankExit(row["rank"], row["code"]) for row in read_json(self._attempt.exits))
        except FileNotFoundError:
            return ()

    def _evidence(
        self, ended_by: EndedBy, events: Mapping[int, list[dict[str, Any]]], exits: tuple[RankExit, ...]
    ) -> Evidence:
        exceptions = tuple(
            RankException(rank, event["time"], event["phase"], event["type"], event["message"])
            for rank, lines in events.items()
            for event in lines
            if event["kind"] == "exception"
        )
        return Evidence(
            ended_by,
            self._ranks.returncode,
            {rank: lines[-1]["phase"] for rank, lines in events.items() if lines},
            exceptions,
            exits,
            oom_killed=_oom_kills() > self._oom_kills,
            limit_seconds=self._limits.hang_seconds if ended_by == "hang" else self._limits.run_seconds,
        )


def outcome_of(diagnosis: Diagnosis, allocation: str, started: float, exit_code: Optional[int] = None) -> Outcome:
    """The record of an attempt that ends now."""
    return Outcome(
        diagnosis.outcome,
        diagnosis.phase,
        allocation,
        started,
        time.time(),
        diagnosis.rank,
        diagnosis.failure_class,
        redact(diagnosis.message),
        diagnosis.remedy,
        exit_code,
    )


def _parent(pid: int) -> Optional[int]:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _oom_kills() -> int:
    """Processes that the kernel has ended for want of memory in this control group (cgroup v2); 0 where unknown."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
        rows = Path(f"/sys/fs/cgroup{group}/memory.events").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(row.split()[1]) for row in rows if row.startswith("oom_kill "))
