"""A real Slurm cluster of four nodes on this host, with accounting, in one folder.

    python -m tests.slurm.cluster up FOLDER       # until it is taken down
    python -m tests.slurm.cluster down FOLDER     # every process of it, jobs included, and the folder

Nothing outside the folder is read or written but Debian's programs: not /etc/slurm, nor the system's munge and MariaDB.
Any number of clusters run beside each other, as root or as any user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from launch.common.file_lock import holder
from tests.slurm.configuration import (
    ACCOUNT,
    CLUSTER_NAME,
    NODES,
    PATH,
    ClusterError,
    Ports,
    check_packages,
    free_ports,
    install_database,
    user_name,
    write,
)
from tests.slurm.supervisor import LOCK

ROOT = Path(__file__).resolve().parents[2]
UP_WITHIN = 90  # Seconds to wait for each thing: ten times what it takes on two busy cores.
LOG_TAIL = 15  # Lines of each daemon's log in an error.


class Cluster:
    """The cluster whose files are under ``folder``. Two objects with one folder are the same cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Return this process's environment for commands on the cluster, without variables of an enclosing job."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        return own | {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def up(self, *, with_this_process: bool) -> None:
        """Start the cluster. Return once all nodes are idle and sacct answers. The folder must be missing or empty.

        Args:
            with_this_process: take the cluster down when this process ends, however it ends.

        Raises:
            ClusterError: the cluster did not start. The error has the ends of all logs. The cluster has been taken
                down.
        """
        check_packages()
        if self.folder.exists() and any(self.folder.iterdir()):
            state = "holds a cluster that is up" if holder(self.folder / LOCK) else "is not empty"
            raise ClusterError(f"{self.folder} {state}: take it down first, or use another folder")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ports = free_ports()
        write(self.folder, ports)
        try:
            self.run(*install_database(self.folder))
            self._supervise(os.getpid() if with_this_process else None)
            self._start_all(ports)
        except BaseException as error:
            logs = self._log_tails()
            self.down()
            if isinstance(error, ClusterError):
                raise ClusterError(f"{error}\n{logs}") from None
            raise

    def down(self) -> None:
        """End every process of the cluster and its jobs, and delete its database (100 MB). Keep configuration and
        logs.
        """
        owner = holder(self.folder / LOCK)
        if owner is not None:
            os.kill(owner.pid, signal.SIGTERM)
            self._wait(lambda: holder(self.folder / LOCK) is None, "the cluster to end")
        if self._supervisor is not None:
            self._supervisor.wait()
        if (self.folder / "database").exists():
            shutil.rmtree(self.folder / "database")

    def pid(self, name: str) -> int:
        """Return the process id of a daemon (munged, mariadbd, slurmdbd, slurmctld, node1 ...), or 0 if it is down."""
        try:
            return int((self.folder / "daemons" / name).read_text() or 0)
        except FileNotFoundError:
            return 0

    def start(self, name: str) -> None:
        asked = self.folder / "daemons" / name
        asked.touch()
        self._wait(lambda: self.pid(name) > 0 or not asked.exists(), f"{name} to start")

    def stop(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop a daemon. SIGTERM lets slurmctld save its state. SIGKILL loses the jobs of its last five seconds, with
        their ids."""
        os.kill(self.pid(name), number)
        self._wait(lambda: not (self.folder / "daemons" / name).exists(), f"{name} to end")

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Kill a daemon for the time of the block, as if its host had failed."""
        self.stop(name, signal.SIGKILL)
        try:
            yield
        finally:
            self.start(name)

    def run(self, *command: str, seconds: float = 60) -> str:
        """Return a command's standard output, stripped.

        Raises:
            ClusterError: the command failed or took too long.
        """
        try:
            done = subprocess.run(
                command, env=self.environment, cwd=self.folder, text=True, capture_output=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{' '.join(command)}: not done within {seconds} s") from None
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def wait_until_idle(self) -> None:
        """Wait until every node answers and no job is left on it."""
        idle = ["idle"] * len(NODES)
        try:
            self._wait(
                lambda: self._answer("sinfo", "-Nho", "%t").split() == idle,
                "four idle nodes",
                needs=["slurmctld", *NODES],
            )
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self._answer('sinfo', '-Nho', '%n %t %E')}") from None

    def _supervise(self, parent: int | None) -> None:
        command = [sys.executable, "-m", "tests.slurm.supervisor", str(self.folder), *([str(parent)] if parent else [])]
        with open(self.folder / "log" / "supervisor.out", "ab") as out:
            process = self._supervisor = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        self._wait(lambda: holder(self.folder / LOCK) is not None or process.poll() is not None, "the supervisor")
        if process.poll() is not None:
            raise ClusterError(f"the supervisor ended with {process.returncode}")

    def _start_all(self, ports: Ports) -> None:
        self.start("munged")
        self._wait((self.folder / "munge.socket").is_socket, "munged's socket", needs=["munged"])
        self.start("mariadbd")
        self._wait(lambda: _accepts(ports.database), "the database", needs=["mariadbd"])
        self.start("slurmdbd")
        self._wait(lambda: _accepts(ports.accounting), "the accounting", needs=["slurmdbd"])
        # Limits bind only jobs of an account.
        for entity in (("cluster", CLUSTER_NAME), ("account", ACCOUNT), ("user", user_name(), f"account={ACCOUNT}")):
            self.run("sacctmgr", "--immediate", "add", *entity)
        for name in ("slurmctld", *NODES):
            self.start(name)
        self.wait_until_idle()
        self._wait(lambda: "JobID" in self._answer("sacct", "-P"), "sacct to answer", needs=["slurmdbd"])

    def _answer(self, *command: str) -> str:
        """Return what :meth:`run` returns, or "" if the command fails, for example while daemons start."""
        with contextlib.suppress(ClusterError):
            return self.run(*command)
        return ""

    def _wait(self, condition: Callable[[], bool], what: str, *, needs: Sequence[str] = ()) -> None:
        until = time.monotonic() + UP_WITHIN
        while not condition():
            ended = [name for name in needs if not (self.folder / "daemons" / name).exists()]
            if ended:
                raise ClusterError(f"{', '.join(ended)} ended while waiting for {what}")
            if time.monotonic() > until:
                raise ClusterError(f"waited {UP_WITHIN} s for {what}")
            time.sleep(0.1)

    def _log_tails(self) -> str:
        """Return the ends of all logs. A daemon logs to NAME.log. Before that, or without a log file, it logs to
        NAME.out."""
        written = {
            path.stem: path for path in sorted((self.folder / "log").iterdir(), reverse=True) if path.stat().st_size
        }
        return "\n".join(
            "\n".join([f"--- {path}", *path.read_text(errors="replace").splitlines()[-LOG_TAIL:]])
            for path in written.values()
        )


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def main(action: str, folder: Path) -> int:
    cluster = Cluster(folder)
    try:
        if action == "up":
            cluster.up(with_this_process=False)
            print(f"Four idle nodes. To use them:\n    export SLURM_CONF={cluster.folder}/slurm.conf")
        elif not (cluster.folder / "slurm.conf").exists():
            raise ClusterError(f"{cluster.folder} holds no cluster")
        else:
            cluster.down()
            shutil.rmtree(cluster.folder)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("up", "down"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
