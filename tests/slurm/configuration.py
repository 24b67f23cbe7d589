"""Write the configuration of the cluster's daemons, and the commands that start them, from a folder and free ports.

The Slurm is 22.05, as Debian builds it. Four slurmd share one host. Each is a node of eight GPUs whose device files are
links to /dev/null, because Slurm rejects a count without ``File=``, and sets CUDA_VISIBLE_DEVICES only for devices, not
for plain files. Sizes are claims (``config_overrides``): nothing is pinned or reserved.
"""

from __future__ import annotations

import os
import pwd
import random
import secrets
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from launch.common.atomic_files import write_json

CLUSTER_NAME = "test"
ACCOUNT = "test"
NODES = ("node1", "node2", "node3", "node4")
GPUS_A_NODE = 8
CPUS_A_NODE = 16
MEMORY_A_NODE = 64000  # MB
MEMORY_A_CPU = 4000  # MB for a job that requests none. Without this default, a job takes all memory of the node.

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "munge", "mariadb-server")
PROGRAMS = (
    "munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd",
    "sacctmgr", "sacct", "sinfo", "squeue", "sbatch", "srun", "scancel", "scontrol",
)  # fmt: skip
# A user's own PATH may lack the folders of daemons.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

STEP_SOCKET = f"spool.{NODES[0]}/{NODES[0]}_99999.4294967291"  # The longest name of a socket on which a daemon listens.
LONGEST_SOCKET = 107  # Bytes of a path in sockaddr_un, without the final zero.


class ClusterError(Exception):
    """The cluster cannot start, or a command on it failed."""


@dataclass(frozen=True)
class Ports:
    database: int
    accounting: int
    controller: int
    nodes: tuple[int, ...]


def check_packages() -> None:
    """Check that Slurm and its companions are installed.

    Raises:
        ClusterError: with the command that installs what is missing.
    """
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        raise ClusterError(
            f"the Slurm cluster needs {', '.join(missing)}, not found on {PATH}; on Debian:\n"
            f"    apt-get install --no-install-recommends {' '.join(PACKAGES)}"
        )


def free_ports() -> Ports:
    """Return ports on which nothing listens, below the kernel's range for outgoing connections (from 32768)."""
    probes = [_bound() for _ in range(3 + len(NODES))]
    numbers = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return Ports(numbers[0], numbers[1], numbers[2], tuple(numbers[3:]))


def _bound() -> socket.socket:
    while True:
        probe = socket.socket()
        try:
            probe.bind(("", random.SystemRandom().randrange(10000, 32000)))
            return probe
        except OSError:
            probe.close()


def write(folder: Path, ports: Ports) -> None:
    """Write the whole configuration into ``folder``, which belongs to this user alone."""
    if len(os.fsencode(folder / STEP_SOCKET)) > LONGEST_SOCKET:
        raise ClusterError(f"the path of a socket in {folder} is over {LONGEST_SOCKET} bytes; use a shorter folder")
    for name in ("log", "run", "state", "gpus", "cgroup", "tmp", "daemons", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    for gpu in range(GPUS_A_NODE):
        (folder / "gpus" / f"gpu{gpu}").symlink_to("/dev/null")
    password = secrets.token_hex(16)
    _write_private(folder / "munge.key", secrets.token_bytes(128))
    _write_private(folder / "slurmdbd.conf", _slurmdbd_conf(folder, ports, password).encode())
    _write_private(folder / "accounting.sql", _accounting_sql(password).encode())
    write_json(folder / "daemons.json", _daemons(folder, ports))
    (folder / "slurm.conf").write_text(_slurm_conf(folder, ports))
    (folder / "gres.conf").write_text(
        f"NodeName={','.join(NODES)} Name=gpu File={folder}/gpus/gpu[0-{GPUS_A_NODE - 1}]\n"
    )
    # slurmd starts a cgroup plugin although nothing here uses one. Version 2 needs delegated controllers. Version 1
    # accepts an empty mount point.
    (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n")


def install_database(folder: Path) -> list[str]:
    return ["mariadb-install-db", "--no-defaults", f"--datadir={folder}/database", f"--user={user_name()}",
            "--auth-root-authentication-method=socket", "--skip-test-db", *_SMALL_DATABASE]  # fmt: skip


def _daemons(folder: Path, ports: Ports) -> dict[str, list[str]]:
    """Return the foreground command of each daemon by its name, in the order of their dependencies."""
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
              f"--pid-file={folder}/run/munged.pid", f"--seed-file={folder}/munge.seed",
              f"--log-file={folder}/log/munged.log"]  # fmt: skip
    mariadbd = ["mariadbd", "--no-defaults", f"--user={user_name()}", f"--datadir={folder}/database",
                f"--tmpdir={folder}/tmp", f"--socket={folder}/mariadb.socket", f"--pid-file={folder}/run/mariadbd.pid",
                f"--port={ports.database}", "--bind-address=127.0.0.1", "--skip-name-resolve",
                f"--init-file={folder}/accounting.sql", *_SMALL_DATABASE]  # fmt: skip
    nodes = {node: ["slurmd", "-D", "-N", node] for node in NODES}
    return {"munged": munged, "mariadbd": mariadbd, "slurmdbd": ["slurmdbd", "-D"],
            "slurmctld": ["slurmctld", "-D"], **nodes}  # fmt: skip


_SMALL_DATABASE = (
    "--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0",
    "--innodb-lock-wait-timeout=900",
)  # fmt: skip


def _slurm_conf(folder: Path, ports: Ports) -> str:
    nodes = "\n".join(
        f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_A_NODE} "
        f"RealMemory={MEMORY_A_NODE} Gres=gpu:{GPUS_A_NODE} State=UNKNOWN"
        for node, port in zip(NODES, ports.nodes, strict=True)
    )
    return f"""\
ClusterName={CLUSTER_NAME}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports.controller}
SlurmUser={user_name()}
SlurmdUser={user_name()}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
SlurmdParameters=config_overrides
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU={MEMORY_A_CPU}
GresTypes=gpu
# Seconds, short where a test waits for them. The main scheduler and the backfill one look again at once, a job that is
# cancelled has KillWait from SIGTERM to SIGKILL (on a busy host it needs some), a slurmd that does not answer is DOWN
# after SlurmdTimeout, and a node whose processes outlive SIGKILL is drained after UnkillableStepTimeout, for good.
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=2
KillWait=8
SlurmdTimeout=60
UnkillableStepTimeout=180
# 1: a node comes back by itself if it was away, not if scontrol took it down.
ReturnToService=1
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={ports.accounting}
AccountingStoragePass={folder}/munge.socket
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=limits
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
{nodes}
PartitionName=gpu Nodes={",".join(NODES)} Default=YES MaxTime=INFINITE State=UP
"""


def _slurmdbd_conf(folder: Path, ports: Ports, password: str) -> str:
    return f"""\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={ports.accounting}
SlurmUser={user_name()}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={ports.database}
StorageUser=slurm
StoragePass={password}
StorageLoc=accounting
"""


def _accounting_sql(password: str) -> str:
    return f"""\
CREATE USER IF NOT EXISTS slurm@127.0.0.1 IDENTIFIED BY '{password}';
GRANT ALL ON accounting.* TO slurm@127.0.0.1;
"""


def _write_private(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def user_name() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
