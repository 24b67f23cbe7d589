"""The tags of a run in Weights & Biases."""

from __future__ import annotations

import json

from launch.common.atomic_files import RecordError
from launch.contract.paths import AttemptPaths
from launch.contract.spec import RunSpec

LONGEST_TAG = 64
"""W&B rejects longer tags."""


def run_tags(spec: RunSpec) -> tuple[str, ...]:
    """Return engine, model, layout, graph implementation, scope and device of a run."""
    axes = {axis: getattr(spec.parallelism, axis) for axis in ("tp", "pp", "vpp", "ep", "cp", "dp")}
    layout = " ".join(f"{axis}{degree}" for axis, degree in axes.items() if degree > 1) or "one rank"
    graph = spec.cuda_graph
    scope = f"scope {' '.join(graph.scope)}" if graph.scope else ""
    impl = graph.impl if graph.impl != "none" or graph.name else "eager"
    return spec.engine, spec.model.preset, layout, graph.name or impl, scope, spec.placement.device


def gpu_tags(attempt: AttemptPaths) -> tuple[str, ...]:
    """Return the names of the GPUs of ``attempt``, or none before its ranks have recorded them."""
    try:
        return tuple(sorted(set(json.loads(attempt.read(attempt.environment))["hardware"]["gpus"])))
    except (OSError, RecordError, ValueError, KeyError):
        return ()


def usable_tags(*tags: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag[:LONGEST_TAG] for tag in tags if tag))
