"""A Slurm cluster as the target of a plan: the partitions of a profile, and why they cannot run a cell."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from launch import ROOT
from launch.common.text import count
from launch.contract.bundle import Step
from launch.contract.paths import IMAGE
from launch.contract.plan import Cell, Reason
from launch.contract.spec import Device, RunSpec
from orchestrator.errors import input_error
from orchestrator.suggestion import suggestion
from orchestrator.targets.host import Host, StartSettings, check_software, installed_packages
from orchestrator.targets.job_request import JobRequest, limits_of, placement_request, runs_request
from orchestrator.targets.partition import Partition
from orchestrator.targets.profile import Profile
from orchestrator.targets.scontrol import Configuration, query_configuration, query_partitions


@dataclass(frozen=True)
class Cluster:
    """What a profile requests, and what the cluster has.

    The limits of a QOS or an account are not included. sbatch's error or a waiting job's reason will name those.
    """

    profile: Profile
    partitions: tuple[Partition, ...]
    """The partitions that the profile names. A job may run in any of them."""
    configuration: Configuration
    packages: frozenset[str] | None
    """The packages that ranks find, or None if ranks have their own Python."""
    folders: tuple[str, ...] = ()
    """Folders that containers mount under the same path."""
    not_checked: tuple[str, ...] = ()
    """What only Slurm could answer, if it was not asked. ``partitions`` is then empty."""
    scheduler: ClassVar[Literal["slurm"]] = "slurm"

    @property
    def cluster_name(self) -> str:
        return self.profile.name

    @property
    def gpu_memory_gib(self) -> float | None:
        return self.profile.gpu_memory_gib

    @property
    def device(self) -> Device:
        """The meaning of ``resources.device: auto``: cuda if Slurm lists GPUs or was not asked."""
        has_gpus = any(nodes.gpus for partition in self.partitions for nodes in partition.nodes)
        return "cuda" if has_gpus or self.not_checked else "cpu"

    def check_spec(self, spec: RunSpec) -> tuple[Reason, ...]:
        """Return why this cluster cannot run ``spec``."""
        request = placement_request(vars(spec.placement), 0, self.profile)
        return (*self._check_size(request), *check_software(spec, self.packages))

    def check_time(self, runs: Sequence[Cell]) -> tuple[Reason, ...]:
        """Return why no allocation lasts for a bundle, given the cell of each of its runs."""
        request = runs_request(runs, self.profile)
        fitting = [partition for partition in self.partitions if not partition.check(request, self.profile)]
        longest = max((partition.max_minutes for partition in fitting), default=math.inf)
        if request.minutes <= longest:
            return ()
        message = (
            f"{len(runs)} runs of {limits_of(runs).run_seconds / 60:g} minutes need an allocation of {request.minutes} "
            f"minutes, and partition {' or '.join(p.name for p in fitting)} allows at most {longest:g}"
        )
        fix = "lower resources.minutes_per_run or repeats, pick cells with --only, or name another partition"
        return (Reason("cluster.time", message, fix),)

    def start_settings(self, spec: RunSpec) -> StartSettings:
        """Return how the ranks of ``spec`` start in their allocation."""
        profile, request = self.profile, placement_request(vars(spec.placement), 0, self.profile)
        python = profile.python or ("python3" if profile.container_image else sys.executable)
        arguments = tuple(_srun_arguments(profile, self.folders))
        tasks, cpus = request.ranks_per_node // spec.ranks_per_task, request.cpus_per_rank * spec.ranks_per_task
        step = Step(request.nodes, tasks, cpus, python, arguments)
        image = {IMAGE: profile.container_image} if profile.container_image else {}
        return StartSettings(0, (), step, {**image, **profile.environment})

    def _check_size(self, request: JobRequest) -> tuple[Reason, ...]:
        most = self.profile.max_nodes
        if most is not None and request.nodes > most:
            needs = f"the run needs {count('node', request.nodes)}"
            message = f"{needs}, and max_nodes of the profile lets a sweep use {most} at a time"
            return (Reason("cluster.max_nodes", message, f"raise max_nodes to {request.nodes} in the profile"),)
        # If there are several partitions, report the reasons of the one that comes closest.
        return min((partition.check(request, self.profile) for partition in self.partitions), key=len, default=())


Target = Host | Cluster
"""What runs the cells of a plan."""


def find_cluster(profile: Profile, store: Path) -> Cluster:
    """Ask Slurm once what ``profile`` can use. ``store`` is the folder of sweeps.

    Raises:
        InputError: there is no such partition.
        SystemFault: Slurm does not answer.
    """
    has_own_python = profile.container_image is not None or profile.python is not None
    return Cluster(
        profile,
        _choose_partitions(profile, query_partitions()),
        query_configuration(),
        None if has_own_python else installed_packages(),
        _shared_folders(store),
    )


def read_cluster(profile: Profile, store: Path) -> Cluster:
    """Return the cluster as ``profile`` alone describes it, for a plan without an answer from Slurm."""
    partition = f"partition {profile.partition}" if profile.partition else "the default partition"
    not_checked = (
        f"{partition}: whether it is there and up, its time limit, and the number, CPUs, GPUs and memory of its nodes",
        "GPUs: they are assumed where the recipe leaves resources.device out",
        "software of the nodes: Python, PyTorch, what engines need, the container image",
        "files that runs read: data and weights",
        "paths in the scripts: Python, this program and the store are those of this host",
        f"the longest job array: assumed to be Slurm's default, {_UNASKED.max_array_size:,}",
    )
    return Cluster(profile, (), _UNASKED, None, _shared_folders(store), not_checked)


_UNASKED = Configuration("", max_array_size=1001)


def _shared_folders(store: Path) -> tuple[str, ...]:
    return str(ROOT), str(store.absolute())


def _choose_partitions(profile: Profile, partitions: Sequence[Partition]) -> tuple[Partition, ...]:
    """Return the partitions that ``profile`` names, else those of the shell's SBATCH_PARTITION, else the default."""
    by_name = {partition.name: partition for partition in partitions}
    place = f"profile {profile.name}: partition" if profile.name else "partition"
    named = profile.partition or os.environ.get("SBATCH_PARTITION")
    if named is None:
        default = tuple(partition for partition in partitions if partition.is_default)
        if not default:
            fix = f"name one in a profile: {', '.join(by_name)}"
            raise input_error(place, "none is named, and the cluster has no default partition", fix)
        return default
    names = [name.strip() for name in named.split(",")]
    for name in names:
        if name not in by_name:
            raise input_error(place, f"the cluster has no partition {name!r}", suggestion(name, by_name))
    return tuple(by_name[name] for name in names)


def _srun_arguments(profile: Profile, folders: Sequence[str]) -> Iterator[str]:
    """Yield the arguments of srun for ranks."""
    yield f"--mpi={profile.mpi}"
    if profile.container_image is not None:
        yield f"--container-image={profile.container_image}"
        yield f"--container-mounts={','.join((*(f'{f}:{f}' for f in folders), *profile.container_mounts))}"
    yield from profile.srun
