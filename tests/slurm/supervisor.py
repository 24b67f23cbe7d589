"""Be the only parent of all the cluster's daemons. Processes that they leave behind become its children, and end with
it.

An empty file ``daemons/NAME`` requests a daemon. While the daemon runs, the file holds its process id. When it has
ended for any reason, the file is removed. So any process can start a daemon (see cluster.py), stop one (with a signal)
and list them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from launch.common.atomic_files import read_json, write_text
from launch.common.file_lock import Lock
from tests.slurm.configuration import PATH

LOCK = "supervisor.lock"
LOOK_EVERY = 0.05  # seconds
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # Numbers of prctl(2).


class Supervisor:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: dict[str, list[str]] = read_json(folder / "daemons.json")
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.stopping = False

    def serve(self, parent: int | None) -> None:
        """Serve until SIGTERM or the end of ``parent``. The folder's lock keeps a second server out."""
        lock = Lock.try_acquire(self.folder / LOCK)
        if lock is None:
            return
        signal.signal(signal.SIGTERM, self._stop)
        _prctl(SET_CHILD_SUBREAPER, 1)
        while not self.stopping and parent in (None, os.getppid()):
            self._start_asked_for()
            self._reap()
            time.sleep(LOOK_EVERY)
        self._end_all()
        lock.release()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _start_asked_for(self) -> None:
        for name, command in self.commands.items():
            path = self.folder / "daemons" / name
            if name not in self.running and path.exists():
                self.running[name] = self._start(name, command)
                write_text(path, str(self.running[name].pid))

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / "log" / f"{name}.out", "ab") as out:
            return subprocess.Popen(
                command, cwd=self.folder, env={"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")},
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                preexec_fn=lambda: _prctl(SET_PDEATHSIG, signal.SIGKILL),
            )  # fmt: skip

    def _reap(self) -> bool:
        """Reap ended children. Return whether more may exist."""
        children = True
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            children = False
        for name in [name for name, process in self.running.items() if process.poll() is not None]:
            del self.running[name]
            (self.folder / "daemons" / name).unlink()
        return children

    def _end_all(self) -> None:
        """Kill everything. SIGTERM would not suffice: a job may ignore it, and the folder is not used again."""
        while self._reap():
            for pid in _descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(LOOK_EVERY)


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    Supervisor(Path(sys.argv[1])).serve(int(sys.argv[2]) if len(sys.argv) > 2 else None)
