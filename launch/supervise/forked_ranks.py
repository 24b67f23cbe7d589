"""Ranks that a server forks (launch/train/fork_server.py), so that the runs of a bundle import torch once.

All forks of a server have its imports and its environment. So another engine, environment, source or package version gets
another server. A server that ends before it has forked a rank is not replaced, and ranks start as new interpreters.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.common.checkout import package_versions, source_digest
from launch.contract.spec import RunSpec
from launch.supervise.child_process import POLL_SECONDS, start

REPORT_SECONDS = 5.0
"""How long a server may take to report that a rank has ended."""
MESSAGE_BYTES = 4096
SERVER = "launch.train.fork_server"
INDUCTOR = "torch._inductor.compile_fx"
MEGATRON = "launch.engines.megatron.engine"
DYNAMO = "torch._dynamo"
"""Transformer Engine imports this, and a run imports Transformer Engine only before its capture."""


@dataclass(frozen=True)
class Imported:
    """What the forks of a server share."""

    names: tuple[str, ...]
    """The engine, and modules that it imports late."""
    environment: Mapping[str, str]
    source: str
    versions: Mapping[str, str]


class ForkServers:
    """The fork servers of one supervisor, of which at most one runs. Their output goes to ``log``."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._server: ForkServer | None = None
        self._unusable: list[Imported] = []

    def serve(self, spec: RunSpec, environment: Mapping[str, str]) -> ForkServer | None:
        """Return a server for the ranks of ``spec`` with ``environment``; None if one has ended before it forked a rank."""
        needed = Imported(imports(spec), environment, source_digest(), package_versions())
        last = self._server
        if last is not None and last.has_ended() and not last.has_forked:
            self._unusable.append(last.imported)
            sys.stderr.write("further ranks with these imports are new interpreters too\n")
        if last is not None and (last.has_ended() or last.imported != needed):
            self.close()
        if self._server is None and needed not in self._unusable:
            self._server = ForkServer(needed, self._log)
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def imports(spec: RunSpec) -> tuple[str, ...]:
    """Return the engine, and the modules that all runs of the bundle import late."""
    late = {
        MEGATRON: spec.engine == "megatron",
        DYNAMO: spec.placement.device == "cuda",
        INDUCTOR: spec.training.compile != "none",
    }
    return (spec.engine, *(module for module, needed in late.items() if needed))


class ForkServer:
    """A process of launch.train.fork_server. It is still importing when the first ranks are ordered."""

    def __init__(self, imported: Imported, log: Path) -> None:
        self.imported = imported
        self.has_forked = False
        self._ranks: list[ForkedRank] = []
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs:
            self._process = start(SERVER, imported.names, imported.environment, log, stdin=theirs.fileno())

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, arguments: Sequence[str], places: Sequence[Mapping[str, str]], log: Path) -> list[ForkedRank]:
        """Order a rank for each of ``places``, the variables in which ranks differ."""
        first, ranks = len(self._ranks), [ForkedRank(self, log) for _ in places]
        self._ranks += ranks
        order = {"first": first, "places": places, "arguments": arguments, "log": str(log)}
        # A server that has ended forks no rank, which the ranks notice.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(json.dumps(order).encode())
        return ranks

    def read_reports(self) -> None:
        """Read what the server has reported about its ranks since the last call."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while content := self._channel.recv(MESSAGE_BYTES):
                report = json.loads(content)
                rank = self._ranks[report["number"]]
                if "code" in report:
                    rank.code = report["code"]
                else:
                    self.has_forked = True
                    rank.begin(report["pid"])

    def exit_code(self) -> int | None:
        return self._process.poll()

    def has_ended(self) -> bool:
        return self.exit_code() is not None

    def kill(self) -> None:
        """End the server, and by the kernel its ranks."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the server, which has no running ranks. It ends by itself once nobody can order ranks, after it has reaped them."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REPORT_SECONDS if self.has_forked else 0)
        self.kill()


class ForkedRank:
    """An ordered rank, with the methods of Popen that are needed here. Until it is forked, its process is the server."""

    def __init__(self, server: ForkServer, log: Path) -> None:
        self.code: int | None = None
        """Its exit code, or minus the signal that ended it."""
        self._server = server
        self._log = log
        self._pid: int | None = None
        self._file: int | None = None
        """A file that becomes readable when the process has ended (pidfd_open(2))."""
        self._gone_since: float | None = None

    @property
    def pid(self) -> int:
        return self._server.pid if self._pid is None else self._pid

    def begin(self, pid: int) -> None:
        self._pid = pid
        with contextlib.suppress(ProcessLookupError):
            self._file = os.pidfd_open(pid)

    def is_lost(self) -> bool:
        """Return whether the server ended before it forked this rank."""
        return self.poll() is not None and self._pid is None

    def poll(self) -> int | None:
        has_ended = self._server.has_ended()
        self._server.read_reports()
        if self.code is None and self._is_gone():
            if has_ended:
                self._end_with_server()
            elif self._pid is not None:
                self._await_report()
        if self.code is not None and self._file is not None:
            os.close(self._file)
            self._file = None
        return self.code

    def _end_with_server(self) -> None:
        self.code = -signal.SIGKILL
        if self._pid is not None:
            with open(self._log, "a") as log:
                log.write(
                    f"rank {self._pid} was killed, because its fork server ended (exit code {self._server.exit_code()})\n"
                )

    def _is_gone(self) -> bool:
        return self._file is None or bool(select.select([self._file], [], [], 0)[0])

    def _await_report(self) -> None:
        """Kill the server if it does not report this rank's end, because it is stopped or hangs. The kernel still knows the exit
        code."""
        self._gone_since = self._gone_since or time.monotonic()
        if time.monotonic() - self._gone_since > REPORT_SECONDS:
            if self._pid is not None:
                self.code = unreaped_code(self._pid)
            sys.stderr.write(
                f"fork server {self._server.pid} does not report that rank {self._pid} ended, so it is killed\n"
            )
            self._server.kill()

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: the rank still runs after ``seconds``.
        """
        deadline = time.monotonic() + seconds if seconds is not None else float("inf")
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked rank", seconds or 0.0)
            time.sleep(POLL_SECONDS)
        return code


def unreaped_code(pid: int) -> int | None:
    """Return the exit code of a process that has ended, or minus the signal that ended it; None if its parent has reaped it."""
    try:
        state, *_, status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None
    return os.waitstatus_to_exitcode(int(status)) if state == "Z" else None
