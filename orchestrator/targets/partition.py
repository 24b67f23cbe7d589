"""A partition of a Slurm cluster: its nodes and limits, and what of a request they cannot hold. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launch.contract.plan import Reason
from orchestrator.targets.job_request import JobRequest
from orchestrator.targets.profile import Profile

_FEATURE = re.compile(r"\w[\w.-]*")
"""A constraint that is one feature, and not an expression over several."""
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
"""By the suffix of sbatch's --mem; without one it is megabytes."""


@dataclass(frozen=True)
class Nodes:
    """Nodes of a partition that are alike."""

    count: int
    cpus: int
    megabytes: int
    features: frozenset[str] = frozenset()
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Of each node, by type; the type is "" where the site gives them none."""

    def gpus_of(self, kind: str | None) -> int:
        """How many GPUs of type ``kind`` a node has; None is of all types together."""
        return sum(self.gpus.values()) if kind is None else self.gpus.get(kind, 0)


@dataclass(frozen=True)
class Partition:
    """``max_minutes`` and ``max_nodes`` are of one job, infinite where there is no limit. Nodes that are down count:
    they come back."""

    name: str
    is_default: bool
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    max_minutes: float
    min_nodes: int
    max_nodes: float
    nodes: tuple[Nodes, ...]

    def lacks(self, request: JobRequest, profile: Profile) -> tuple[Reason, ...]:
        """Why no job of ``request``'s size starts here, none where one does. Its minutes are not looked at."""
        if self.state != "UP":
            message = f"partition {self.name} is {self.state}: no job starts in it"
            return (Reason("cluster.partition", message, "wait until it is UP, or name another one in the profile"),)
        feature = profile.constraint if profile.constraint and _FEATURE.fullmatch(profile.constraint) else None
        nodes = [alike for alike in self.nodes if feature is None or feature in alike.features]
        where = f"partition {self.name}" + (f" with feature {feature}" if feature else "")
        if not nodes:
            there = ", ".join(sorted({name for alike in self.nodes for name in alike.features})) or "none"
            remedy = f"mend partition and constraint in the profile; features there: {there}"
            return (Reason("cluster.nodes", f"there is no node in {where}", remedy),)
        return tuple(_too_small(nodes, request, profile, where)) or tuple(self._too_few(nodes, request, profile, where))

    def _too_few(self, nodes: Sequence[Nodes], request: JobRequest, profile: Profile, where: str) -> Iterator[Reason]:
        """Each of ``nodes`` may be large enough, and yet there may be too few that are, or that one job may have."""
        fitting = sum(alike.count for alike in nodes if not any(_too_small([alike], request, profile, where)))
        remedy = "name another partition in the profile, or change resources.nodes"
        if request.nodes > fitting:
            large = "" if fitting == sum(alike.count for alike in nodes) else " that are large enough"
            message = f"{request.nodes} nodes are needed, and {where} has {fitting}{large}"
            yield Reason("cluster.nodes", message, remedy)
        elif not self.min_nodes <= request.nodes <= self.max_nodes:
            most = "" if self.max_nodes == math.inf else f" and {self.max_nodes:g} at most"
            message = f"{request.nodes} nodes are needed, and {where} gives a job {self.min_nodes} at least{most}"
            yield Reason("cluster.nodes", message, remedy)


def _too_small(nodes: Sequence[Nodes], request: JobRequest, profile: Profile, where: str) -> Iterator[Reason]:
    """What no single one of ``nodes`` has enough of."""
    kind = profile.gpu_type
    needs = (
        ("cluster.cpus", request.ranks_per_node * request.cpus_per_rank, max(alike.cpus for alike in nodes), "CPUs",
         "lower resources.threads_per_rank or the profile's cpus_per_task, or raise resources.nodes"),
        ("cluster.gpus", request.gpus_per_node, max(alike.gpus_of(kind) for alike in nodes),
         f"GPUs of type {kind}" if kind else "GPUs",
         "raise resources.nodes, lower the layout's degrees, or name another partition in the profile"),
        ("cluster.memory", _megabytes(profile.mem), max(alike.megabytes for alike in nodes), "MB of memory",
         "lower mem in the profile, or name another partition in it"),
    )  # fmt: skip
    for rule, needed, most, noun, remedy in needs:
        if needed > most:
            message = f"{needed:,.0f} {noun} a node are needed, and nodes of {where} have {most:,} at most"
            yield Reason(rule, message, remedy)


def _megabytes(mem: str | None) -> float:
    """Of a profile's ``mem``; 0 asks for all of a node's, which every node has."""
    if mem is None:
        return 0.0
    number = float(mem.rstrip("KMGTkmgt"))
    return number * _MEGABYTES.get(mem[-1].upper(), 1.0)
