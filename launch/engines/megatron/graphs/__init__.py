"""CUDA graphs of Megatron-Core: who captures what of a step, and the evidence that it ran."""

from __future__ import annotations

from typing import Any

from launch.contract.spec import RunSpec
from launch.engines.megatron.graphs.full_iteration import FullIteration
from launch.engines.megatron.graphs.local import LocalCudaGraphs
from launch.engines.megatron.graphs.protocol import Eager, Graphed, Steps
from launch.engines.megatron.graphs.transformer_engine import LayerCallables
from launch.engines.megatron.schedule import Schedule


def make_steps(spec: RunSpec, schedule: Schedule, optimizer: Any) -> Steps:
    """What runs the forward and backward passes of ``spec``."""
    impl = spec.cuda_graph.impl
    if impl == "none":
        return Eager(schedule, spec.cuda_graph.warmup_steps)
    if impl == "full_iteration":
        return Graphed(spec.cuda_graph, schedule, FullIteration(spec, schedule))
    if impl == "local":
        return Graphed(spec.cuda_graph, schedule, LocalCudaGraphs(spec, schedule))
    return Graphed(spec.cuda_graph, schedule, LayerCallables(spec, schedule, optimizer))
