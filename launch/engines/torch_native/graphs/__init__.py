"""The graph implementations of the torch_native engine, by their name in a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import EagerStep, GraphedStep, StepRunner
from launch.engines.torch_native.compiled_model import CompiledModel
from launch.engines.torch_native.graphs.full_iteration import FullIteration
from launch.engines.torch_native.graphs.layer_callables import TorchCallables, TransformerEngineCallables
from launch.engines.torch_native.graphs.torch_compile import Compiled
from launch.engines.torch_native.train_step import TrainStep

IMPLEMENTATIONS: Mapping[str, Callable[[RunSpec, TrainStep], GraphedStep]] = {
    "full_iteration": FullIteration,
    "torch": TorchCallables,
    "transformer_engine": TransformerEngineCallables,
    "torch_compile": Compiled,
}


def make_runner(spec: RunSpec, train_step: TrainStep) -> StepRunner:
    """Return the runner of the steps of ``spec``, eager or graphed."""
    settings = spec.cuda_graph
    if settings.impl != "none":
        return IMPLEMENTATIONS[settings.impl](spec, train_step)
    model = train_step.model
    recompilations = (lambda: model.recompilations) if isinstance(model, CompiledModel) else (lambda: 0)
    return EagerStep(train_step.forward_backward, settings.warmup_steps, recompilations)
