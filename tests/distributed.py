"""Run a function on every rank of a world, on gloo, in worker processes that successive calls share::

    losses = workers(4).run(train_rank, spec)  # one result a rank

Pass a module-level function: workers find it by name. Keep it out of test modules, because every worker would import
all that the module imports. Return plain values and tensors. Each call makes its own process groups, which takes
milliseconds, so that no call inherits the state of another. Worker processes are forks of a server that has imported
torch (tests/conftest.py).
"""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch.common.parent_death import PARENT, die_with_parent
from tests.integration.fork_server import CAN_FORK, RANK, RANK_SERVER, SERVER, ForkedPopen

SECONDS = 600.0
"""Seconds that a call may take. A few are usual, but ranks yield to all other tests, and some compile."""
GRACE_SECONDS = 5.0
"""Seconds from the first rank's failure to the end of those that still wait for it."""
ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"


class RankError(RuntimeError):
    """A rank raised, died or did not answer. ``rank`` is the first one that did."""

    def __init__(self, rank: int, world_size: int, said: str) -> None:
        super().__init__(f"rank {rank} of {world_size}: {said}")
        self.rank = rank


@dataclass(frozen=True)
class Workers:
    """Run calls on the first ``world_size`` worker processes."""

    world_size: int

    def run(self, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS) -> list[Any]:
        """Return the results of ``function(*arguments)`` by rank, with tensors on the CPU.

        Raises:
            RankError: a rank failed. The error has the traceback of the first one. No other rank is left waiting for
                it.
        """
        try:
            _POOL.begin(self.world_size, function, arguments, seconds)
            answers = _POOL.answers(self.world_size, seconds)
        except BaseException:
            _POOL.clear()  # Otherwise the next call would take the unread answers for its own.
            raise
        if len(answers) < self.world_size or any(answer.lost for answer in answers.values()):
            _POOL.clear()
        if failure := _failure(answers, self.world_size, seconds):
            raise failure
        return [answers[rank].value for rank in range(self.world_size)]


def workers(world_size: int) -> Workers:
    return Workers(world_size)


def end_workers() -> None:
    """End all workers, and delete their state. The next call starts new ones. The end of a session ends them too."""
    _POOL.clear()


@dataclass(frozen=True)
class _Call:
    number: int
    world_size: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    seconds: float


@dataclass(frozen=True)
class _Answer:
    time: float
    value: Any = None
    error: str = ""
    lost: bool = False
    """The process has ended."""


def _failure(answers: dict[int, _Answer], world_size: int, seconds: float) -> RankError | None:
    """Return the error of the rank that failed first, if any.

    A dead process causes the errors of other ranks, although its end is noticed after them.
    """
    silent = [rank for rank in range(world_size) if rank not in answers]
    said = f"no answer from ranks {silent} (a call has {seconds:g} s)" if silent else ""
    failed = [(not answer.lost, answer.time, rank) for rank, answer in answers.items() if answer.error]
    if failed:
        *_, rank = min(failed)
        return RankError(rank, world_size, answers[rank].error + said)
    return RankError(silent[0], world_size, said) if silent else None


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection

    def answer(self) -> _Answer:
        try:
            packed = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return _Answer(time.time(), error=f"its process ended with {self.process.wait()}", lost=True)
        return _Answer(**_unpacked(packed))


def _packed(content: Any) -> memoryview:
    packed = io.BytesIO()
    torch.save(content, packed)
    return packed.getbuffer()


def _unpacked(packed: bytes) -> Any:
    # The unpickler that accepts only weights is written in Python, and slower.
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)


class _Pool:
    """Worker processes, as many as the largest world needed so far. They end with this process."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._calls = 0

    def begin(self, world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> None:
        if any(worker.process.poll() is not None for worker in self._workers):
            self.clear()
        self._grow(world_size)
        self._calls += 1
        for worker in self._workers[:world_size]:
            worker.connection.send_bytes(_packed(_Call(self._calls, world_size, function, arguments, seconds)))

    def answers(self, world_size: int, seconds: float) -> dict[int, _Answer]:
        """Return the answers that arrive in time, by rank. Once a rank fails, the others get little time."""
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers[:world_size])}
        deadline = time.monotonic() + seconds
        answers: dict[int, _Answer] = {}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                answers[rank] = self._workers[rank].answer()
                if answers[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def clear(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.wait()
            worker.connection.close()
        self._workers.clear()

    def _grow(self, world_size: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        for rank in range(len(self._workers), world_size):
            self._workers.append(_start(rank, self._store.port))


_POOL = _Pool()


def _start(rank: int, port: int) -> _Worker:
    """Start a worker process. Its standard input is the connection."""
    ours, theirs = Pipe()
    command = [sys.executable, "-m", RANK, str(rank), str(port)]
    environment = os.environ | {PARENT: str(os.getpid())}
    if CAN_FORK:
        environment[SERVER] = os.environ[RANK_SERVER]
    popen = ForkedPopen if CAN_FORK else subprocess.Popen
    process = popen(command, stdin=theirs.fileno(), cwd=ROOT, env=environment)
    theirs.close()
    return _Worker(process, ours)


def _serve(rank: int, port: int, connection: Connection) -> None:
    """Run calls in a worker process until the session ends."""
    # Up to eight workers leave little time to tests of other processes, which wait for runs and then give up.
    os.nice(10)
    gc.freeze()  # The imports of the server never become garbage.
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    while True:
        try:
            call = _unpacked(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(_packed(_answered(call, rank, store, connection)))


def _answered(call: _Call, rank: int, store: dist.Store, connection: Connection) -> dict[str, Any]:
    # Process groups time out before the call does, so that their error shows where the rank was.
    limit = timedelta(seconds=call.seconds * 0.8)
    own = dist.PrefixStore(str(call.number), store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=call.world_size, timeout=limit)
    try:
        content = {"value": call.function(*call.arguments)}
        dist.barrier()  # A rank that leaves early would cut off the others.
    except Exception:
        content = {"error": traceback.format_exc()}
    content["time"] = time.time()
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    return content


if __name__ == "__main__":
    die_with_parent()
    _serve(int(sys.argv[1]), int(sys.argv[2]), Connection(os.dup(0)))
