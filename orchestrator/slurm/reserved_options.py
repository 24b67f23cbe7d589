"""Options of sbatch and srun that a profile cannot add: those that have a field, and those that are set here.

By their long names, as sbatch(1) and srun(1) of Slurm 22.05 to 25.05 have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_DEVICES = "each rank sees every GPU of its node, and takes the one of its local rank"
_FIELD_OF: Mapping[str, str] = {
    **{name: name for name in ("account", "constraint", "exclusive", "mem", "mpi", "partition", "qos", "reservation",
                               "wckey")},
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-socket", "gres"), "gpus"),
    "container-image": "container_image",
    "container-mounts": "container_mounts",
    "cpus-per-task": "cpus_per_task",
}  # fmt: skip
"""Options that have a field of their own."""
_SET_HERE: tuple[tuple[str, str, str, str], ...] = (
    # why there is no setting it, of both commands, of sbatch alone, of srun alone
    ("the recipe's resources say it", "nodes ntasks ntasks-per-node ntasks-per-core ntasks-per-gpu ntasks-per-socket "
     "ntasks-per-switch", "", ""),
    ("resources.minutes_per_run of the recipe says it", "time time-min", "", ""),
    ("jobs and their files are found by it", "chdir error input job-name open-mode output", "wrap",
     "jobid label unbuffered"),
    ("jobs get the shell's variables, and those under environment", "export export-file", "", "preserve-env"),
    ("a run is made again as a fresh attempt, by the orchestrator", "no-kill", "no-requeue requeue signal", ""),
    ("max_nodes and max_jobs bound what runs at a time", "", "array dependency hold kill-on-invalid-dep", ""),
    (_DEVICES, "gpus-per-task", "", ""),
    ("the orchestrator reads the command's answer", "clusters help quiet test-only usage verbose version",
     "parsable wait", ""),
    ("a run takes its whole allocation, ranks node by node", "", "",
     "distribution exact exclude exclusive het-group kill-on-bad-exit multi-prog nodelist overlap relative"),
)  # fmt: skip
_WAYS_OUT: Mapping[str, Mapping[str, str]] = {
    command: {name: row[0] for row in _SET_HERE for name in f"{row[1]} {row[column]}".split()}
    for command, column in (("sbatch", 2), ("srun", 3))
}


def flaw_of_option(command: Literal["sbatch", "srun"], name: str, value: str) -> tuple[str, str] | None:
    """Why a profile cannot add option ``name`` of ``command``: what is wrong, and the way out; None where it can."""
    if not _NAME.fullmatch(name) or len(name) == 1:
        return f"not the long name of an option of {command}", f"write it as {command} --help does, after the dashes"
    if name in _WAYS_OUT[command]:
        return "set by the orchestrator itself", f"leave it out: {_WAYS_OUT[command][name]}"
    if name in _FIELD_OF:
        return "has a field of its own", f"write it as {_FIELD_OF[name]}, at the top of the profile"
    if name == "gpu-bind" and value != "none":
        return "hides GPUs from ranks", f"leave it out, or write none: {_DEVICES}"
    return None
