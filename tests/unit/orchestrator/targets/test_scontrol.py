"""Test reading Slurm's output about partitions and nodes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from orchestrator.targets.partition import Nodes, Partition
from orchestrator.targets.scontrol import parse_gpus, parse_minutes, parse_partitions, query_configuration

# Shortened output of scontrol of Slurm 22.05. The parser ignores the fields that 24.05 adds.
DESCRIBED = """\
PartitionName=batch AllowGroups=ALL AllowAccounts=a,b Default=YES QoS=N/A Hidden=NO MaxNodes=64 MaxTime=04:00:00 MinNodes=0 LLN=NO Nodes=n[1-9] State=UP TotalNodes=9
PartitionName=long AllowGroups=ALL AllowAccounts=ALL Default=NO QoS=N/A Hidden=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=2 LLN=NO Nodes=(null) State=DRAIN TotalNodes=0 JobDefaults=(null) PowerDownOnIdle=NO
"""
NODES = """\
batch|8|128|1030000|h100,ib|gpu:h100:8(S:0-1),nvme:2
batch|1|64|515000|(null)|(null)
"""


def test_partitions_with_their_nodes_and_limits() -> None:
    batch, long = parse_partitions(DESCRIBED, NODES)
    nodes = (Nodes(8, 128, 1030000, frozenset({"h100", "ib"}), {"h100": 8}), Nodes(1, 64, 515000))
    assert batch == Partition("batch", True, "UP", 240.0, 0, 64, nodes)
    assert long == Partition("long", False, "DRAIN", math.inf, 2, math.inf, ())


@pytest.mark.parametrize(("described", "nodes"), [
    ("PartitionName=batch Default=YES", ""),
    (DESCRIBED.replace("04:00:00", "soon"), ""),
    (DESCRIBED, "batch|8|128"),
    (DESCRIBED, "batch|many|128|1|(null)|(null)"),
])  # fmt: skip
def test_what_is_printed_otherwise_is_refused_and_not_guessed_at(described: str, nodes: str) -> None:
    with pytest.raises((KeyError, ValueError)):
        parse_partitions(described, nodes)


@pytest.mark.parametrize(("text", "expected"), [
    ("UNLIMITED", math.inf),
    ("00:30:00", 30.0),
    ("00:00:30", 0.5),
    ("1-12:00:00", 2160.0),
    ("7-00:00:00", 10080.0),
])  # fmt: skip
def test_times(text: str, expected: float) -> None:
    assert parse_minutes(text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("(null)", {}),
    ("gpu:8", {"": 8}),
    ("gpu", {"": 1}),
    ("gpu:a100", {"a100": 1}),
    ("gpu:a100:8(S:0-1)", {"a100": 8}),
    ("gpu:a100:no_consume:4,gpu:h100:4(S:0,1),shard:16", {"a100": 4, "h100": 4}),
    ("gpu:8(IDX:0-7),gpu:2,craynetwork:4", {"": 10}),
])  # fmt: skip
def test_gpus_among_generic_resources(text: str, expected: dict[str, int]) -> None:
    assert parse_gpus(text) == expected


@pytest.mark.parametrize(
    ("parameters", "most"),
    [
        ("(null)", 1001),
        ("bf_interval=30,max_array_tasks=500", 500),
        ("max_array_tasks=5000,defer", 1001),
        ("max_array_tasks=0", 0),
    ],
)
def test_the_scheduler_may_limit_arrays_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: str, most: int
) -> None:
    """sbatch rejects a longer array, and its message names no limit."""
    settings = f"ClusterName = big\nMaxArraySize            = 1001\nSchedulerParameters     = {parameters}\n"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat <<'end'\n{settings}end\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert query_configuration().max_array_size == most
