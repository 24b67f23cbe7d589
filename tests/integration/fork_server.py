"""Fork the commands, fork servers, ranks and reports of tests from a server that has imported torch, pandas and
matplotlib. Fork the workers of tests/distributed.py from another, which has imported Megatron-Core.

The imports of a bundle's fork server take two CPU seconds, those of a report one, and those of a command nearly one.
Queues and supervisors remain separate interpreters. In supervisors and commands, ``fork_children`` makes
``subprocess.Popen`` ask the server for the modules of ``FORKED``.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import inspect
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launch.common.parent_death import PARENT, die_with_parent

SERVER = "FORK_SERVER"
"""The variable that has the path of the server's socket."""
RANK_SERVER = "RANK_SERVER"
"""The variable that has the path of the other server's socket, in the processes of pytest."""
COMMAND, RANK = "orchestrator", "tests.distributed"
FORKED = ("launch.train.fork_server", "launch.train.worker", "analysis.report", COMMAND, RANK)
MODULES = ("launch.train.fork_server", "launch.train.worker", "analysis.report")
"""Those of ``FORKED`` that each fork runs as its own copy. A command runs ``orchestrator.__main__``, which nothing imports."""
PRELOADED = (
    *MODULES, "analysis.report.write_report", "analysis.report.plots", "launch.engines.torch_native.engine",
    "torch._inductor.compile_fx", *(
        f"orchestrator.cli.verbs.{verb}"
        for verb in ("sweep", "resume", "status", "plan", "report", "cancel", "logs", "advise")
    ),
)  # fmt: skip
OF_RANKS = (
    "pytest", "torch._inductor.compile_fx", "tests.megatron_release", "launch.engines.megatron.engine",
    "launch.engines.torch_native.engine", "launch.train.data_loader",
)  # fmt: skip
"""What the other server imports."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]

_KNOWN = (
    "self args executable preexec_fn close_fds pass_fds cwd env startupinfo creationflags shell p2cread p2cwrite c2pread "
    "c2pwrite errread errwrite restore_signals gid gids uid umask start_new_session process_group"
)
"""The parameters of Popen._execute_child, in Python 3.11 to 3.13."""
CAN_FORK = " ".join(inspect.signature(subprocess.Popen._execute_child).parameters) == _KNOWN
"""Whether ``ForkedPopen`` fits this Python. If not, tests start ranks as usual, which takes longer, and pytest says so.
"""


class ForkedPopen(subprocess.Popen):
    """A child process. The server forks it if its module is one of ``FORKED``; any other child starts as usual."""

    _server: socket.socket | None = None

    def _execute_child(self, args: Any, *settings: Any) -> None:
        _, _, _, _, cwd, environment, _, _, _, *pipes = settings[:15]
        if not any(module in args for module in FORKED):
            return super()._execute_child(args, *settings)
        self._server = socket.socket(socket.AF_UNIX)
        environment = dict(environment or os.environ)
        self._server.connect(environment.get(SERVER) or os.environ[SERVER])
        request = {
            "command": list(map(os.fspath, args)), "environment": environment,
            "folder": str(cwd or Path.cwd()), "session": settings[-2],
            "limits": {number: resource.getrlimit(number) for number in LIMITS},
        }  # fmt: skip
        given = (pipes[0], pipes[3], pipes[5])
        standard = [own if own != -1 else number for number, own in enumerate(given)]
        socket.send_fds(self._server, [json.dumps(request).encode() + b"\n"], standard)
        self._close_pipe_fds(*pipes)
        self._answers = self._server.makefile("rb")
        self.pid = int(self._answers.readline())
        self._child_created = True

    def _internal_poll(self, *arguments: Any, **settings: Any) -> int | None:
        if self._server is None:
            return super()._internal_poll(*arguments, **settings)
        return self._answered(0)

    def _wait(self, timeout: float | None) -> int:
        if self._server is None:
            return super()._wait(timeout=timeout)
        if (code := self._answered(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _answered(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._server], [], [], seconds)[0]:
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._answers.close()
            self._server.close()
        return self.returncode


def fork_children() -> None:
    """Let this process start the modules of ``FORKED`` as forks of the server."""
    if CAN_FORK:
        subprocess.Popen = ForkedPopen


def serve(path: str, *preloaded: str) -> list[str]:
    """Answer requests, after importing the modules. Return in each fork, with the command that it runs."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.begun")
    listener.listen(64)
    os.replace(f"{path}.begun", path)  # Whoever finds it can connect.
    select.select([listener], [], [])  # Without a request, nothing is imported.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # They are the libraries' own.
        for module in preloaded:
            with contextlib.suppress(ImportError):  # A host may lack Megatron-Core.
                importlib.import_module(module)
    for module in MODULES:
        sys.modules.pop(module, None)  # Each fork runs its own copy of the module.
    gc.freeze()
    children: dict[int, _Child] = {}
    while True:
        connections = [child.connection for child in children.values() if not child.is_left]
        ready, _, _ = select.select([listener, *children, *connections], [], [])
        for descriptor in children.keys() & set(ready):
            children.pop(descriptor).answer()
            os.close(descriptor)
        for child in children.values():
            if child.connection in ready:
                child.leave()
        if listener in ready and (command := _fork(listener, children)) is not None:
            return command


@dataclass
class _Child:
    """A fork of this server, and the connection of the process that asked for it."""

    pid: int
    connection: socket.socket
    is_rank: bool
    """Whether it ends with the process that asked for it. The kernel ends it only with its parent, this server."""
    is_left: bool = False

    def answer(self) -> None:
        """Send the exit code of the child, which has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(OSError):
            self.connection.sendall(f"{code}\n".encode())
        self.connection.close()

    def leave(self) -> None:
        """Note that the process that asked for the child has ended."""
        self.is_left = True
        self.connection.close()
        if self.is_rank:
            os.kill(self.pid, signal.SIGKILL)


def _fork(listener: socket.socket, children: dict[int, _Child]) -> list[str] | None:
    """Fork a child for the next process that asks, and add it to ``children`` by its descriptor. Return its command in the
    fork."""
    connection, _ = listener.accept()
    content, files, *_ = socket.recv_fds(connection, 1 << 20, 3)
    while not content.endswith(b"\n"):
        if not (piece := connection.recv(1 << 20)):
            connection.close()  # Whoever asked was killed meanwhile.
            return None
        content += piece
    request = json.loads(content)
    child = os.fork()
    if child == 0:
        for file in (listener, connection, *(other.connection for other in children.values())):
            file.close()
        for descriptor in children:
            os.close(descriptor)
        return _become(request, files)
    for file in files:
        os.close(file)
    children[os.pidfd_open(child)] = _Child(child, connection, PARENT in request["environment"])
    with contextlib.suppress(OSError):
        connection.sendall(f"{child}\n".encode())
    return None


def _become(request: dict[str, Any], files: list[int]) -> list[str]:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    for number, limits in request["limits"].items():
        resource.setrlimit(int(number), limits)
    os.environ.clear()
    os.environ.update(request["environment"])
    if PARENT in os.environ:
        os.environ[PARENT] = str(os.getppid())
    command: list[str] = request["command"]
    if COMMAND in command:
        # A background shell may ignore Ctrl-C, and this server writes without a buffer. A command does neither.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdout = open(1, "w", closefd=False)
    return command


def run(command: list[str]) -> None:
    """Run a module as Python does for ``[...] -m module arguments``."""
    sys.orig_argv[:] = command
    sys.path[:0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.modules.pop("sitecustomize", None)
    if find_spec("sitecustomize"):
        importlib.import_module("sitecustomize")

    place = command.index("-m") + 1
    sys.argv[:] = command[place:]
    status = 0
    try:
        runpy.run_module(command[place], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        status = ended.code or 0
    # Otherwise Python would free all imports of the server, which takes as long as importing them.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    die_with_parent()
    gc.disable()
    run(serve(*sys.argv[1:]))
