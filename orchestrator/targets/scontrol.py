"""Read Slurm's configuration: partitions, their nodes, and the largest array."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from launch.slurm.command import Unanswered, run
from orchestrator.errors import SystemFault
from orchestrator.targets.partition import Nodes, Partition


class Configuration(NamedTuple):
    cluster_name: str
    max_array_size: int
    """The most elements of one job array."""


def query_partitions() -> tuple[Partition, ...]:
    """Return every partition, including hidden ones.

    Raises:
        SystemFault: Slurm does not answer.
    """
    partitions = _query("scontrol", "--all", "--oneliner", "show", "partition")
    # One line for equal nodes of a partition: their number, then CPUs, megabytes, features and generic resources of each.
    nodes = _query("sinfo", "--all", "--noheader", "--exact", "--format=%R|%D|%c|%m|%f|%G")
    try:
        return parse_partitions(partitions, nodes)
    except (KeyError, ValueError) as error:
        raise SystemFault(f"this version cannot read the output of scontrol or sinfo: {error!r}") from error


def query_configuration() -> Configuration:
    """Return the settings of Slurm that matter here.

    Raises:
        SystemFault: Slurm does not answer.
    """
    settings = dict(re.findall(r"^(\w+)\s*=\s*(\S+)", _query("scontrol", "show", "config"), re.MULTILINE))
    try:
        tasks = re.search(r"max_array_tasks=(\d+)", settings.get("SchedulerParameters", ""))
        sizes = [settings["MaxArraySize"], *(tasks.groups() if tasks else ())]
        return Configuration(settings["ClusterName"], min(map(int, sizes)))
    except KeyError as error:
        raise SystemFault(f"`scontrol show config` prints no {error}") from error


def _query(*command: str) -> str:
    try:
        return run(*command)
    except Unanswered as error:
        message = f"Slurm does not answer `{' '.join(command)}`: {error}"
        raise SystemFault(f"{message}. Try again when `scontrol ping` prints UP") from error


def parse_partitions(partitions: str, nodes: str) -> tuple[Partition, ...]:
    """Parse what scontrol prints about partitions, and sinfo about their nodes.

    Raises:
        KeyError, ValueError: the output has another form.
    """
    by_partition: dict[str, list[Nodes]] = {}
    for line in nodes.splitlines():
        name, number, cpus, megabytes, features, resources = line.split("|")
        known = frozenset(features.split(",")) - {"(null)", ""}
        equal = Nodes(int(number), int(cpus), int(megabytes), known, parse_gpus(resources))
        by_partition.setdefault(name, []).append(equal)
    return tuple(_parse_partition(line, by_partition) for line in partitions.splitlines() if line.strip())


def parse_minutes(text: str) -> float:
    """Return a time limit ("1-12:00:00", UNLIMITED) in minutes."""
    if text in ("UNLIMITED", "INFINITE"):
        return math.inf
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = clock.split(":")
    return int(days or 0) * 1440 + int(hours) * 60 + int(minutes) + int(seconds) / 60


def parse_gpus(resources: str) -> dict[str, int]:
    """Return the GPUs by type in generic resources ("gpu:a100:8(S:0-1),nvme:1")."""
    found: dict[str, int] = {}
    for resource in re.sub(r"\([^)]*\)", "", resources).split(","):
        name, *words = (word for word in resource.split(":") if word != "no_consume")
        if name == "gpu":
            number = int(words.pop()) if words and words[-1].isdigit() else 1
            kind = words[0] if words else ""
            found[kind] = found.get(kind, 0) + number
    return found


def _parse_partition(line: str, nodes: Mapping[str, list[Nodes]]) -> Partition:
    values = dict(word.split("=", 1) for word in line.split() if "=" in word)
    return Partition(
        name=values["PartitionName"],
        is_default=values["Default"] == "YES",
        state=values["State"],
        max_minutes=parse_minutes(values["MaxTime"]),
        min_nodes=int(values["MinNodes"]),
        max_nodes=math.inf if values["MaxNodes"] in ("UNLIMITED", "INFINITE") else int(values["MaxNodes"]),
        nodes=tuple(nodes.get(values["PartitionName"], ())),
    )
