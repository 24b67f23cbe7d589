"""One attempt's ranks, watched until they end or have to be ended, and what became of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Optional

from launch.failures import Diagnosis, EndedBy, Evidence, RankException, RankExit, diagnose
from launch.files import read_json
from launch.process import start
from launch.record import AttemptPaths, Limits, Outcome, Phase, read_events
from launch.redact import redact

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""Between asking processes to end (or to print their stacks) and ending them."""


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
        if ended_by == "hang":
            self._print_stacks()
        if ended_by != "itself":
            self._end_ranks()
        diagnosis, exit_code = self._diagnose(ended_by), self._ranks.returncode
        return Outcome(
            diagnosis.outcome,
            diagnosis.phase,
            allocation,
            self._started,
            time.time(),
            diagnosis.rank,
            diagnosis.failure_class,
            redact(diagnosis.message),
            diagnosis.remedy,
            exit_code,
        )

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

    def _print_stacks(self) -> None:
        """SIGABRT makes each rank's faulthandler write its stack to the rank's log."""
        for path in (self._attempt.root / "events").glob("rank*.jsonl"):
            pid = next(read_events(self._attempt, _rank(path)), {}).get("pid")
            if pid is not None and _parent(pid) == self._ranks.pid:
                os.kill(pid, signal.SIGABRT)
        time.sleep(1.0)

    def _end_ranks(self) -> None:
        self._ranks.terminate()
        try:
            self._ranks.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._ranks.kill()  # its ranks follow it (launch.lifeline)
            self._ranks.wait()

    def _diagnose(self, ended_by: EndedBy) -> Diagnosis:
        events = {_rank(p): list(read_events(self._attempt, _rank(p))) for p in sorted((self._attempt.root / "events").glob("rank*.jsonl"))}  # fmt: skip
        phase: Phase = events[0][-1]["phase"] if events.get(0) else "init"
        exceptions = tuple(
            RankException(rank, event["time"], event["phase"], event["type"], event["message"])
            for rank, lines in events.items()
            for event in lines
            if event["kind"] == "exception"
        )
        try:
            exits = tuple(RankExit(row["rank"], row["code"]) for row in read_json(self._attempt.exits))
        except FileNotFoundError:
            exits = ()
        return diagnose(
            Evidence(
                ended_by,
                self._ranks.returncode,
                phase,
                phase == "teardown",
                exceptions,
                exits,
                oom_killed=_oom_kills() > self._oom_kills,
                limit_seconds=self._limits.hang_seconds if ended_by == "hang" else self._limits.run_seconds,
            )
        )


def _rank(path: Path) -> int:
    return int(path.stem.removeprefix("rank"))


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
