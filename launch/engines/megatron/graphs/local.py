"""Megatron-Core's own graphs of whole layers (``cuda_graph.impl: local``)."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import CudaGraphManager, delete_cuda_graphs

from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import replaced
from launch.engines.megatron.graphs.megatron_capture import MegatronCapture
from launch.engines.megatron.observed_router import routers_of
from launch.engines.megatron.random_tracker import generators_of_steps
from launch.engines.megatron.schedule import Schedule
from launch.engines.megatron.side_stream import on_stream
from launch.engines.random_states import random_states_kept


class LocalCudaGraphs(MegatronCapture):
    """Captures at the end of the first step, in the order in which layers ran.

    The first step runs eagerly and records this order. Before each capture, Megatron runs ``cuda_graph.warmup_steps`` passes
    over zeros (megatron-core 0.16.1 pipeline_parallel/schedules.py:693, transformer/cuda_graphs.py:906). Without a pipeline,
    all microbatches use one pair of graphs. Otherwise each microbatch of a step has its own pair.
    """

    mechanism = "CudaGraphManager, a forward and a backward graph for each layer"

    def __init__(self, spec: RunSpec, schedule: Schedule, optimizer: Any) -> None:
        super().__init__(spec, schedule, optimizer)
        # A GPT layer is captured whole, even if the scope names only a part of it (transformer/transformer_layer.py:467).
        # In a hybrid model, a scope names the layers.
        self.scope = spec.cuda_graph.scope if spec.model.hybrid_override_pattern else ()
        modules = (module for chunk in schedule.chunks for module in chunk.modules())
        self._managers = [module for module in modules if isinstance(module, CudaGraphManager)]

    @property
    def _runners(self) -> list[Any]:
        return [runner for manager in self._managers for runner in manager.cudagraph_runners]

    @property
    def is_captured(self) -> bool:
        runners = self._runners
        return bool(runners) and all(runner.cudagraph_created for runner in runners)

    def run_capture_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the step. The schedule captures after it has finalized gradients, its last call."""
        config, begun = self._schedule.config, 0.0
        finalize = config.finalize_model_grads_func

        def finalize_and_start_timer(*arguments: Any, **keywords: Any) -> None:
            nonlocal begun
            finalize(*arguments, **keywords)
            # Neither release sets generators back after its warm-up passes (0.16.1 transformer/cuda_graphs.py:905).
            after_capture.enter_context(random_states_kept(generators_of_steps(self._schedule.device)))
            torch.cuda.synchronize()
            begun = time.perf_counter()

        stream = torch.cuda.current_stream()
        config.finalize_model_grads_func = finalize_and_start_timer
        with ExitStack() as after_capture:
            loss = self._schedule.run(batch)
        config.finalize_model_grads_func = finalize
        on_stream(stream)
        self._capture_seconds = time.perf_counter() - begun
        self.graphs = sum(2 for runner in self._runners if runner.cudagraph_created)
        # A transformer block also has a manager, which runs nothing in training.
        layers = sum(bool(manager.cudagraph_runners) for manager in self._managers)
        self.replays_per_step = layers * self._microbatches
        if self.is_captured:
            for manager in self._managers:
                for number, runner in enumerate(manager.cudagraph_runners):
                    self._observe_replays(number, runner)
        return loss

    def _observe_replays(self, number: int, runner: Any) -> None:
        """Count the replays of ``runner``, which captured its layer as the ``number``th, and keep what its routers choose there."""
        replay = self.counter.counting(runner.fwd_graph.replay)
        for router in routers_of(runner.base_module):
            replay = router.keeping_captured(slice(number, number + 1), replay)
        runner.fwd_graph.replay = replay

    def uncaptured(self) -> AbstractContextManager[None]:
        return replaced(CudaGraphManager, "__call__", _call_uncaptured)

    def close(self) -> None:
        """Release the graphs. ``delete_cuda_graphs`` of 0.16.1 does not release graphs that were created."""
        for runner in self._runners:
            for graph in (runner.fwd_graph, runner.bwd_graph):
                if graph is not None:
                    graph.reset()
        for manager in self._managers:
            manager.cudagraph_runners.clear()
        delete_cuda_graphs()


def _call_uncaptured(manager: Any, layer: Any, inputs: Any, named: Any) -> Any:
    """Call ``layer`` as its manager does without a graph (megatron-core 0.16.1 transformer/cuda_graphs.py:1607)."""
    return torch.nn.Module.__call__(layer, *inputs, **named)
