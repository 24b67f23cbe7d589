"""What Slurm says of its own configuration: partitions, their nodes, the longest array."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from launch.slurm.command import Unanswered, run
from orchestrator.errors import SystemFault
from orchestrator.targets.partition import Nodes, Partition

_PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
_NODES = ("sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%f|%G")
"""A line for nodes of one partition that are alike: how many, CPUs, megabytes, features, generic resources of each."""
_CONFIGURATION = ("scontrol", "show", "config")


class Configuration(NamedTuple):
    cluster_name: str
    max_array_size: int
    """The most elements that an array may have."""


def ask_partitions() -> tuple[Partition, ...]:
    """Every partition, hidden ones too.

    Raises:
        SystemFault: Slurm does not answer.
    """
    described, nodes = run_scontrol(*_PARTITIONS), run_scontrol(*_NODES)
    try:
        return read_partitions(described, nodes)
    except ValueError as error:
        raise SystemFault(f"{_PARTITIONS[0]} or {_NODES[0]} said what this version cannot read: {error}") from error


def query_configuration() -> Configuration:
    """What of Slurm's configuration matters here.

    Raises:
        SystemFault: Slurm does not answer.
    """
    text = run_scontrol(*_CONFIGURATION)
    return Configuration(_value(text, "ClusterName"), int(_value(text, "MaxArraySize")))


def _value(text: str, name: str) -> str:
    found = re.search(rf"^{name}\s*=\s*(\S+)", text, re.MULTILINE)
    if found is None:
        raise SystemFault(f"`{' '.join(_CONFIGURATION)}` names no {name}")
    return found[1]


def run_scontrol(*command: str) -> str:
    """What ``command`` prints.

    Raises:
        SystemFault: it is not there, fails, or takes too long.
    """
    try:
        return run(*command)
    except Unanswered as error:
        told = f"Slurm does not answer `{' '.join(command)}`: {error}"
        raise SystemFault(f"{told}. Try again when `scontrol ping` says UP") from error


def read_partitions(described: str, nodes: str) -> tuple[Partition, ...]:
    """Partitions from what the commands above print.

    Raises:
        ValueError: they print something else.
    """
    by_partition: dict[str, list[Nodes]] = {}
    for line in nodes.splitlines():
        name, count, cpus, megabytes, features, resources = line.split("|")
        known = frozenset(features.split(",")) - {"(null)", ""}
        alike = Nodes(int(count), int(cpus), int(megabytes), known, gpus(resources))
        by_partition.setdefault(name, []).append(alike)
    return tuple(_partition(line, by_partition) for line in described.splitlines() if line.strip())


def minutes(text: str) -> float:
    """A limit of time ("1-12:00:00", UNLIMITED) in minutes."""
    if text in ("UNLIMITED", "INFINITE"):
        return math.inf
    days, _, clock = text.rpartition("-")
    hours, minute, seconds = clock.split(":")
    return int(days or 0) * 1440 + int(hours) * 60 + int(minute) + int(seconds) / 60


def gpus(resources: str) -> dict[str, int]:
    """GPUs by type from generic resources ("gpu:a100:8(S:0-1),nvme:1"); what is no GPU is passed over."""
    found: dict[str, int] = {}
    for resource in re.sub(r"\([^)]*\)", "", resources).split(","):
        name, *words = (word for word in resource.split(":") if word != "no_consume")
        if name == "gpu":
            count = int(words.pop()) if words and words[-1].isdigit() else 1
            kind = words[0] if words else ""
            found[kind] = found.get(kind, 0) + count
    return found


def _partition(line: str, nodes: Mapping[str, list[Nodes]]) -> Partition:
    values = dict(word.split("=", 1) for word in line.split() if "=" in word)
    try:
        name, most = values["PartitionName"], values["MaxNodes"]
        return Partition(
            name=name,
            is_default=values["Default"] == "YES",
            state=values["State"],
            max_minutes=minutes(values["MaxTime"]),
            min_nodes=int(values["MinNodes"]),
            max_nodes=math.inf if most in ("UNLIMITED", "INFINITE") else int(most),
            nodes=tuple(nodes.get(name, ())),
        )
    except KeyError as error:
        raise ValueError(f"no {error} in {line[:80]!r}") from None
