"""The graph implementations of Megatron-Core, by their name in a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import EagerStep, StepRunner
from launch.engines.megatron.graphs.full_iteration import FullIteration
from launch.engines.megatron.graphs.local import LocalCudaGraphs
from launch.engines.megatron.graphs.megatron_capture import MegatronCapture
from launch.engines.megatron.graphs.transformer_engine import LayerCallables
from launch.engines.megatron.schedule import Schedule

IMPLEMENTATIONS: Mapping[str, type[MegatronCapture]] = {
    "full_iteration": FullIteration,
    "local": LocalCudaGraphs,
    "transformer_engine": LayerCallables,
}


def make_runner(spec: RunSpec, schedule: Schedule, optimizer: Any) -> StepRunner:
    """Return the runner of the forward and backward passes of ``spec``, eager or graphed."""
    settings = spec.cuda_graph
    if settings.impl == "none":
        return EagerStep(schedule.run, settings.warmup_steps)
    return IMPLEMENTATIONS[settings.impl](spec, schedule, optimizer)
