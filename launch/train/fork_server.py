"""Fork ranks from a process that has imported their modules: ``python -m launch.train.fork_server ENGINE [MODULE...]``.

launch/supervise/forked_ranks.py starts this server with the environment of the ranks, and orders ranks over a socket on standard
input. A rank is a fork that goes on as ``python -m launch.train.worker`` would. The kernel ends the ranks with the server, and
the server with its supervisor.

A fork cannot use CUDA if its parent has. So this process hides the GPUs from what it imports, and checks that no import used one
before it forks a rank.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.common.parent_death import PARENT, die_with_parent

WORKER = "launch.train.worker"
ORDER_BYTES = 1 << 20
"""More bytes than an order has, which names the ranks' places, the folder of their attempt, and its log."""
HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables with which PyTorch counts no GPUs, and counts them without CUDA (torch/cuda/__init__.py, ``is_available``)."""


def main(engine: str, *modules: str) -> None:
    # Imported modules are never freed, so do not search them for reference cycles (launch/train/worker.py).
    gc.disable()
    with hidden_gpus():
        worker = importlib.import_module(WORKER)
        for module in (worker.ENGINES[engine], *modules):
            importlib.import_module(module)
    if reason := unfit():
        sys.stderr.write(f"ranks cannot be forks of a process that has imported engine {engine}: {reason}\n")
        # End the processes that imports started, too.
        os.killpg(0, signal.SIGKILL)
    # Keep the collector of a rank from writing to pages that it shares with this process.
    gc.freeze()
    arguments = serve(socket.socket(fileno=0))
    if arguments is not None:
        worker.main(arguments)
    # Python would free all imported modules, which takes 0.2 to 0.4 s. First write what was printed, by C libraries too.
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(0)


@contextmanager
def hidden_gpus() -> Iterator[None]:
    """Hide the GPUs from imports inside the context, but tell them whether ranks have any.

    Modules ask while they are imported: Inductor of PyTorch 2.11 then chooses how it times kernels. An import that needs more
    than this answer raises PyTorch's error that there is no GPU.
    """
    inherited = {name: os.environ[name] for name in HIDDEN if name in os.environ}
    os.environ.update(HIDDEN)
    cuda = importlib.import_module("torch").cuda
    ask = cuda.is_available
    if _ranks_have_gpus(inherited):
        cuda.is_available = lambda: True
    try:
        yield
    finally:
        cuda.is_available = ask
        for name in HIDDEN:
            os.environ.pop(name, None)
        os.environ.update(inherited)


def _ranks_have_gpus(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("CUDA_VISIBLE_DEVICES"))


def unfit() -> str:
    """Return why a fork of this process could not be a rank, or "" if it can be one.

    If this process has used CUDA, a fork of it cannot. A fork has only the thread that forked, and it would share child processes.
    """
    cuda = sys.modules["torch"].cuda
    files = {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    if cuda.is_initialized() or any(file.startswith("/dev/nvidia") for file in files):
        return "an import used CUDA"
    # Before a fork, OpenBLAS ends its idle threads by a handler of its own. It starts them again when it needs them.
    if (child := os.fork()) == 0:
        os._exit(cuda._is_in_bad_fork() or (_ranks_have_gpus(os.environ) and not cuda.is_available()))
    if os.waitpid(child, 0)[1]:
        return "CUDA does not start in a fork"
    threads = sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
    if len(threads) > 1:
        return f"an import started threads: {', '.join(threads)}"
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return ""
    return "an import started a process"


def serve(channel: socket.socket) -> list[str] | None:
    """Fork the ranks of each order, and report how they end. Return in each rank its arguments, and here None at the end."""
    server = os.getpid()
    running: dict[int, tuple[int, int]] = {}
    ended: list[int] = []
    while True:
        readable: list[int] = select.select([channel.fileno(), *running], [], [])[0]
        for rank in running.keys() & readable:
            number, pid = running.pop(rank)
            os.close(rank)
            # Inductor's workers would go on beside the next run. A failed rank may leave a compiler that writes a shared file.
            if (code := _exit_code(pid)) == 0:
                os.killpg(pid, signal.SIGKILL)
            _send(channel, number=number, code=code)
            ended.append(pid)
        if channel.fileno() not in readable:
            continue
        content = channel.recv(ORDER_BYTES)
        # Only now: until then the supervisor may send signals to these ranks, so no other process may get their ids.
        while ended:
            os.waitpid(ended.pop(), 0)
        if not content:
            return None
        order = json.loads(content)
        for number, place in enumerate(order["places"], order["first"]):
            pid = os.fork()
            if pid == 0:
                for rank in running:
                    os.close(rank)
                _become_rank(number, place, order, channel, server)
                return list(order["arguments"])
            running[os.pidfd_open(pid)] = (number, pid)


def _exit_code(pid: int) -> int:
    """Return the exit code of a rank that has ended, or minus the signal that ended it. It remains a zombie."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _become_rank(
    number: int, place: Mapping[str, str], order: Mapping[str, Any], channel: socket.socket, server: int
) -> None:
    """Give this fork what a started process has: a parent to die with, a session, a log, an environment and arguments."""
    os.environ.update(place)
    os.environ[PARENT] = str(server)
    die_with_parent()
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Report only now that signals reach the rank's process group.
    _send(channel, number=number, pid=os.getpid())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, channel.detach())
    os.close(nothing)
    sys.argv[:] = [str(sys.modules[WORKER].__file__), *order["arguments"]]
    sys.orig_argv[:] = [sys.executable, "-u", "-m", WORKER, *order["arguments"]]


def _send(channel: socket.socket, **message: int) -> None:
    channel.send(json.dumps(message).encode())


if __name__ == "__main__":
    die_with_parent()
    # Imports may hang on a file system: the supervisor requests stacks with this signal.
    faulthandler.register(signal.SIGUSR1)
    main(*sys.argv[1:])
