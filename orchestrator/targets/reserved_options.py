"""Options of sbatch and srun that the orchestrator sets itself, by their long names in Slurm 22.05 to 25.05."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Command = Literal["sbatch", "srun"]
DEVICES = "each rank sees every GPU of its node, and uses the GPU of its local rank"
_ROWS: tuple[tuple[str, str, str, str], ...] = (
    # Each row: why a profile cannot set the options, then the options of both commands, of sbatch only, of srun only.
    ("the recipe's resources set it", "nodes ntasks ntasks-per-node ntasks-per-core ntasks-per-gpu ntasks-per-socket "
     "ntasks-per-switch", "", ""),
    ("resources.minutes_per_run of the recipe sets it", "time time-min", "", ""),
    ("the orchestrator finds jobs and their files by it", "chdir error input job-name open-mode output", "wrap",
     "jobid label unbuffered"),
    ("jobs get the variables of the shell and of environment", "export export-file", "", "preserve-env"),
    ("the orchestrator retries a run as a new attempt", "no-kill", "no-requeue requeue signal", ""),
    ("max_nodes and max_jobs limit what runs at a time", "", "array dependency hold kill-on-invalid-dep", ""),
    (DEVICES, "gpus-per-task", "", ""),
    ("the orchestrator reads the command's answer", "clusters help quiet test-only usage verbose version",
     "parsable wait", ""),
    ("a run uses its whole allocation, with ranks in the order of nodes", "", "",
     "distribution exact exclude exclusive het-group kill-on-bad-exit multi-prog nodelist overlap relative"),
)  # fmt: skip
RESERVED: Mapping[Command, Mapping[str, str]] = {
    "sbatch": {name: why for why, both, sbatch, _ in _ROWS for name in f"{both} {sbatch}".split()},
    "srun": {name: why for why, both, _, srun in _ROWS for name in f"{both} {srun}".split()},
}
"""Why a profile cannot add an option, by command and option."""
