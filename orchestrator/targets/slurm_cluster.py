"""A Slurm cluster as the target of a plan: the partitions of a profile, and what of a plan they cannot hold."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from analysis.memory.static_memory import state_bytes
from launch.contract.bundle import Step
from launch.contract.plan import Cell, Reason
from launch.contract.spec import Device, RunSpec
from launch.support import unsupported
from orchestrator.errors import input_error, suggestion
from orchestrator.targets.host import Host, Placing, installed_packages, lacks_gpu_for_graphs, lacks_packages
from orchestrator.targets.job_request import JobRequest, limits_of, request_for, runs_request
from orchestrator.targets.partition import Partition
from orchestrator.targets.profile import Profile
from orchestrator.targets.scontrol import Configuration, ask_partitions, query_configuration


@dataclass(frozen=True)
class Cluster:
    """What a profile asks for, and what there is of it. Limits that only the accounting knows, of a QOS or an account,
    are not among it: sbatch speaks of those, or the reason for which a job waits."""

    profile: Profile
    partitions: tuple[Partition, ...]
    """Those that the profile names: a job runs in any one of them."""
    configuration: Configuration
    packages: frozenset[str] | None
    """Those installed where ranks find them; None where ranks have a Python of their own."""
    folders: tuple[str, ...] = ()
    """What is mounted into containers under its own name."""
    scheduler: ClassVar[Literal["slurm"]] = "slurm"

    @property
    def cluster_name(self) -> str:
        return self.profile.name

    @property
    def device(self) -> Device:
        """What ``resources.device: auto`` stands for: cuda where Slurm knows of GPUs."""
        return "cuda" if any(nodes.gpus for partition in self.partitions for nodes in partition.nodes) else "cpu"

    def lacks(self, spec: RunSpec) -> tuple[Reason, ...]:
        """Why this cluster cannot run ``spec``, none where it can."""
        request = request_for(vars(spec.placement), 0, self.profile)
        missing = () if self.packages is None else lacks_packages(spec, self.packages)
        devices = (*self._lacks_allocation(request), *self._lacks_memory(spec), *lacks_gpu_for_graphs(spec))
        return (*devices, *missing, *unsupported(spec))

    def lacks_time(self, runs: Sequence[Cell]) -> tuple[Reason, ...]:
        """Why no allocation lasts for a bundle, given the cell of each of its runs; none where one does."""
        request = runs_request(runs, self.profile)
        fitting = [partition for partition in self.partitions if not partition.lacks(request, self.profile)]
        longest = max((partition.max_minutes for partition in fitting), default=math.inf)
        if request.minutes <= longest:
            return ()
        message = (
            f"{len(runs)} runs of {limits_of(runs).run_seconds / 60:g} minutes make an allocation of {request.minutes} "
            f"minutes, and partition {' or '.join(p.name for p in fitting)} gives {longest:g} at most"
        )
        remedy = "lower resources.minutes_per_run or repeats, pick cells with --only, or name another partition"
        return (Reason("cluster.time", message, remedy),)

    def placing(self, spec: RunSpec) -> Placing:
        """How the ranks of ``spec`` are started in their allocation."""
        profile, request = self.profile, request_for(vars(spec.placement), 0, self.profile)
        python = profile.python or ("python3" if profile.container_image else sys.executable)
        arguments = tuple(_arguments(profile, self.folders))
        step = Step(request.nodes, request.ranks_per_node, request.cpus_per_rank, python, arguments)
        return Placing(0, (), step, profile.environment)

    def _lacks_allocation(self, request: JobRequest) -> tuple[Reason, ...]:
        most = self.profile.max_nodes
        if most is not None and request.nodes > most:
            message = f"{request.nodes} nodes are needed, and the profile lets a sweep hold {most} at a time"
            return (Reason("cluster.max_nodes", message, f"raise max_nodes to {request.nodes} in the profile"),)
        reasons = [partition.lacks(request, self.profile) for partition in self.partitions]
        return min(reasons, key=len)  # of several partitions, that which comes closest

    def _lacks_memory(self, spec: RunSpec) -> tuple[Reason, ...]:
        has = self.profile.gpu_memory_gib
        if has is None or spec.placement.device != "cuda" or (held := state_bytes(spec) / 2**30) <= has:
            return ()
        message = (
            f"weights, gradients and optimizer state of a rank take {held:.1f} GiB before anything is computed, and "
            f"gpu_memory_gib of the profile is {has:g}"
        )
        remedy = (
            "raise parallelism.tp, pp or ep, set parallelism.distributed_optimizer=true where dp is above 1, or "
            "training.gradient_precision=bf16"
        )
        return (Reason("cluster.gpu_memory", message, remedy),)


Target = Host | Cluster
"""What cells are judged against and bundles are placed on."""


def find_cluster(profile: Profile, store: Path) -> Cluster:
    """Ask Slurm, once, what ``profile`` has to choose from. ``store`` is where sweeps are kept.

    Raises:
        InputError: there is no such partition.
        SystemFault: Slurm does not answer.
    """
    has_own_python = profile.container_image is not None or profile.python is not None
    return Cluster(
        profile,
        _named(profile, ask_partitions()),
        query_configuration(),
        None if has_own_python else installed_packages(),
        (str(Path(__file__).resolve().parents[2]), str(store.absolute())),
    )


def _named(profile: Profile, partitions: Sequence[Partition]) -> tuple[Partition, ...]:
    """The partitions that ``profile`` names, else the shell does for sbatch, else the cluster's default one."""
    there = {partition.name: partition for partition in partitions}
    place = f"profile {profile.name}: partition" if profile.name else "partition"
    named = profile.partition or os.environ.get("SBATCH_PARTITION")
    if named is None:
        default = tuple(partition for partition in partitions if partition.is_default)
        if not default:
            known = ", ".join(there)
            raise input_error(
                place, "none is named, and the cluster has no default one", f"name one in a profile: {known}"
            )
        return default
    names = [name.strip() for name in named.split(",")]
    unknown = [name for name in names if name not in there]
    if unknown:
        raise input_error(place, f"the cluster has no partition {unknown[0]!r}", suggestion(unknown[0], there))
    return tuple(there[name] for name in names)


def _arguments(profile: Profile, folders: Sequence[str]) -> Iterator[str]:
    """srun's, for ranks."""
    yield f"--mpi={profile.mpi}"
    if profile.container_image is not None:
        yield f"--container-image={profile.container_image}"
        yield f"--container-mounts={','.join((*(f'{f}:{f}' for f in folders), *profile.container_mounts))}"
    yield from profile.srun
