"""What a Slurm site needs of a job. orchestrator/targets/profile_file.py reads one; docs/clusters.md is the
reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Profile:
    """A cluster's profile. Every default leaves the choice to Slurm, so that an empty profile is a valid one."""

    name: str = ""
    """Of its file; empty where there is none."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    wckey: str | None = None
    gpus: Literal["gres", "gpus_per_node", "none"] = "gres"
    """How GPUs are asked for. "none" is for sites that give whole nodes and refuse both."""
    gpu_type: str | None = None
    gpu_memory_gib: float | None = None
    """Of one GPU: what has to hold more is not submitted."""
    exclusive: bool = False
    mem: str | None = None
    """Memory a node, as sbatch takes it: "0" is all of it."""
    cpus_per_task: int = 0
    """CPUs a rank; 0 asks for the run's threads_per_rank."""
    mpi: str = "none"
    """srun's --mpi for ranks. torch.distributed needs none."""
    container_image: str | None = None
    """Of pyxis. Ranks run in it; the supervisor runs on the host."""
    container_mounts: tuple[str, ...] = ()
    """"FROM:TO[:FLAGS]". This checkout and the store are mounted in any case."""
    python: str | None = None
    """The interpreter of ranks; without one this command's own, or python3 in a container."""
    setup: tuple[str, ...] = ()
    """Lines of shell that the batch script runs first."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Further options of sbatch, by their long names; an empty value is an option without one."""
    srun: tuple[str, ...] = ()
    """Further options of the srun that starts ranks."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for every rank."""
    max_nodes: int | None = None
    """Nodes that one sweep may hold at a time."""
    max_jobs: int | None = None
    """Jobs of one sweep that may run at a time."""
    max_pending_minutes: float | None = None
    """A job that waits for longer is cancelled."""
