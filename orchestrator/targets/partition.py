"""A partition of a Slurm cluster: its nodes and limits, and why it cannot start a job. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from launch.common.text import count
from launch.contract.plan import Reason

# `status` imports this module through scontrol, and does not need OmegaConf as profiles do.
if TYPE_CHECKING:
    from orchestrator.targets.job_request import JobRequest
    from orchestrator.targets.profile import Profile

_FEATURE = re.compile(r"\w[\w.-]*")
"""A constraint that names one feature. Others are expressions over several."""
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
"""Megabytes per unit, by the suffix of sbatch's --mem. Without a suffix, --mem is in megabytes."""
_OTHER_PARTITION = "name another partition in the profile"


@dataclass(frozen=True)
class Nodes:
    """Equal nodes of a partition. ``gpus`` counts a node's GPUs by type, which is "" if the site names none."""

    count: int
    cpus: int
    megabytes: int
    features: frozenset[str] = frozenset()
    gpus: Mapping[str, int] = field(default_factory=dict)

    def count_gpus(self, kind: str | None) -> int:
        """Return the GPUs of type ``kind`` in a node. None counts all types."""
        return sum(self.gpus.values()) if kind is None else self.gpus.get(kind, 0)


@dataclass(frozen=True)
class Partition:
    """A partition. ``max_minutes`` and ``max_nodes`` limit one job, and are infinite without a limit.

    Nodes that are down count, because they come back.
    """

    name: str
    is_default: bool
    state: str
    """UP, DOWN, DRAIN or INACTIVE."""
    max_minutes: float
    min_nodes: int
    max_nodes: float
    nodes: tuple[Nodes, ...]

    def check(self, request: JobRequest, profile: Profile) -> tuple[Reason, ...]:
        """Return why no job of this size can start here, whatever its time limit."""
        if self.state != "UP":
            fix = "wait until it is UP, or name another one in the profile"
            return (Reason("cluster.partition", f"partition {self.name} is {self.state}: no job starts in it", fix),)
        feature = profile.constraint if profile.constraint and _FEATURE.fullmatch(profile.constraint) else None
        nodes = [equal for equal in self.nodes if feature is None or feature in equal.features]
        where = f"partition {self.name}" + (f" with feature {feature}" if feature else "")
        if not nodes:
            features = ", ".join(sorted({name for equal in self.nodes for name in equal.features})) or "none"
            fix = f"change partition or constraint in the profile; features of this partition: {features}"
            return (Reason("cluster.nodes", f"{where} has no node", fix),)
        too_small = tuple(_check_size(nodes, request, profile, where))
        return too_small or tuple(self._check_number(nodes, request, profile, where))

    def _check_number(
        self, nodes: Sequence[Nodes], request: JobRequest, profile: Profile, where: str
    ) -> Iterator[Reason]:
        """Yield why too few nodes are large enough, or why one job may not have that many nodes."""
        fitting = sum(equal.count for equal in nodes if not any(_check_size([equal], request, profile, where)))
        needs = f"the run needs {count('node', request.nodes)}, and {where}"
        fix = f"{_OTHER_PARTITION}, or change resources.nodes"
        if request.nodes > fitting:
            large = "" if fitting == sum(equal.count for equal in nodes) else " that are large enough"
            yield Reason("cluster.nodes", f"{needs} has {fitting}{large}", fix)
        elif not self.min_nodes <= request.nodes <= self.max_nodes:
            most = "" if self.max_nodes == math.inf else f" and at most {self.max_nodes:g}"
            yield Reason("cluster.nodes", f"{needs} gives a job at least {self.min_nodes}{most}", fix)


def _check_size(nodes: Sequence[Nodes], request: JobRequest, profile: Profile, where: str) -> Iterator[Reason]:
    """Yield why none of ``nodes`` is large enough."""
    kind = profile.gpu_type
    needs = (
        ("cluster.cpus", request.ranks_per_node * request.cpus_per_rank, max(equal.cpus for equal in nodes), "CPUs",
         "lower resources.threads_per_rank or the profile's cpus_per_task, or raise resources.nodes"),
        ("cluster.gpus", request.gpus_per_node, max(equal.count_gpus(kind) for equal in nodes),
         f"GPUs of type {kind}" if kind else "GPUs",
         f"raise resources.nodes, lower the degrees of the layout, or {_OTHER_PARTITION}"),
        ("cluster.memory", _megabytes(profile.mem), max(equal.megabytes for equal in nodes), "MB of memory",
         f"lower mem in the profile, or {_OTHER_PARTITION}"),
    )  # fmt: skip
    for rule, needed, most, noun, fix in needs:
        if needed > most:
            message = f"the run needs {needed:,.0f} {noun} on a node, and nodes of {where} have at most {most:,}"
            yield Reason(rule, message, fix)


def _megabytes(mem: str | None) -> float:
    """Return a profile's ``mem`` in megabytes. "0" requests all memory of a node, so every node has enough."""
    if mem is None:
        return 0.0
    return float(mem.rstrip("KMGTkmgt")) * _MEGABYTES.get(mem[-1].upper(), 1.0)
