"""A fork server without torch. Its ranks do what their arguments say: ``python -m
tests.unit.launch.supervise.stub_fork_server ENGINE``.

The name of the engine tells what its import does. As ``... stub_fork_server rank ARGUMENTS``, the module is such a rank
in a new interpreter.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

from launch.common.parent_death import die_with_parent
from launch.train import fork_server


def rank(arguments: list[str]) -> None:
    what, *more = arguments
    if what == "describe":
        Path(more[0]).write_text(json.dumps(description()))
    elif what == "exit":
        sys.exit(int(more[0]))
    elif what == "exit_after":
        while not Path(more[0]).exists():
            time.sleep(0.01)
        sys.exit(int(more[1]))
    elif what == "raise":
        raise ValueError("a rank's own error")
    elif what == "leave":
        print("Python's output", end="")
        ctypes.CDLL(None).printf(b"C's output")
        Path(more[0]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    elif what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    else:
        time.sleep(600)


def description() -> dict[str, object]:
    """Return what a process inherits from its parent."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "environment": {name: value for name, value in os.environ.items() if name != "LAUNCH_PARENT_PID"},
        "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")},
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "files": sorted(path.name for path in Path("/proc/self/fd").iterdir()),
        "standard": [str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)],
        "folder": str(Path.cwd()),
        "path": sys.path,
        "arguments": sys.argv[1:],
        "threads": status["Threads"],
    }


class Imports(types.ModuleType):
    """The modules of engines. Importing one does what its name says."""

    def __getitem__(self, engine: str) -> str:
        if engine == "missing":
            return "no_such_module"
        if engine == "thread":
            threading.Thread(target=time.sleep, args=(600,), daemon=True, name="of-an-import").start()
        if engine == "process":
            subprocess.Popen(["sleep", "600"])
        if engine == "cuda":
            Cuda.is_initialized = lambda: True
        if engine == "driver":
            Cuda._is_in_bad_fork = lambda: True
        if engine == "hang":
            time.sleep(600)
        return "json"


class Cuda:
    """What the server asks torch.cuda."""

    is_available = is_initialized = _is_in_bad_fork = staticmethod(lambda: False)


if __name__ == "__main__":
    die_with_parent()
    if sys.argv[1] == "rank":
        sys.argv.pop(1)
        rank(sys.argv[1:])
    else:
        torch, worker = types.ModuleType("torch"), types.ModuleType(fork_server.WORKER)
        torch.cuda = Cuda  # type: ignore[attr-defined]
        worker.__file__, worker.main, worker.ENGINES = __file__, rank, Imports("engines")  # type: ignore[attr-defined]
        sys.modules |= {"torch": torch, fork_server.WORKER: worker}
        fork_server.main(sys.argv[1])
