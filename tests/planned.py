"""Make plans of small recipes, and the hosts and clusters that they are planned for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launch.contract.plan import Plan
from orchestrator.plan.memory_check import MemoryCheck
from orchestrator.plan.planner import (
    make_plan,
)
from orchestrator.recipe.expand import expand, filter_cells
from orchestrator.recipe.recipe import load
from orchestrator.targets.host import Host
from orchestrator.targets.partition import Nodes, Partition
from orchestrator.targets.profile import Profile
from orchestrator.targets.slurm_cluster import Cluster, Target

CPU_HOST = Host((), frozenset(), has_compiler=True)
GPU_HOST = Host(("0", "1"), frozenset(), has_compiler=True)
ALIKE = Nodes(4, cpus=16, megabytes=64000, features=frozenset({"h100", "ib"}), gpus={"h100": 8})
BATCH = Partition("batch", True, "UP", 240.0, 1, 3, (ALIKE, Nodes(1, cpus=64, megabytes=512000)))
CLUSTER = Cluster(Profile("site"), (BATCH,), 1001, frozenset())
COMPILED = {"cuda_graph.impl": ["torch_compile"]}


def plan(folder: Path, *, host: Target = CPU_HOST, only: Sequence[str] = (), **fields: Any) -> Plan:
    path = folder / "r.yaml"
    model = {} if fields.get("engine") == "command" else {"model": "tiny_moe"}
    path.write_text(yaml.safe_dump({"name": "x", **model, "repeats": 2, **fields}, sort_keys=False))
    recipe = load(path)
    return make_plan(recipe, filter_cells(expand(recipe, host.device), only), host, MemoryCheck(host))


def cluster(partition: Partition = BATCH, **fields: Any) -> Cluster:
    return dataclasses.replace(CLUSTER, profile=Profile("site", **fields), partitions=(partition,))


TWO_NODES: Mapping[str, Any] = {
    "resources": {"nodes": 2, "gpus_per_node": 8, "device": "cuda"},
    "training": {"precision": "bf16", "global_batch_size": 96},
}
