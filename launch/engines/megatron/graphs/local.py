"""``local``: Megatron-Core's own graphs of whole layers.

The first step runs eagerly and is recorded: which layer ran when, forward and backward. At its end, when gradients are
final, graphs are captured in that order, each after ``cuda_graph.warmup_steps`` passes over zeros (megatron-core 0.16.1
pipeline_parallel/schedules.py:693, transformer/cuda_graphs.py:906). Without a pipeline one pair of graphs serves all
micro-batches; with one each micro-batch of a step has its own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import CudaGraphManager, delete_cuda_graphs

from launch.contract.spec import RunSpec
from launch.engines.megatron.graphs.replay_counter import ReplayCounter
from launch.engines.megatron.schedule import Schedule
from launch.engines.megatron.side_stream import on_stream


class LocalCudaGraphs:
    mechanism = "CudaGraphManager, a forward and a backward graph for each layer"
    scope: tuple[str, ...] = ()
    """A GPT layer is captured whole, whichever part of it is named (transformer/transformer_layer.py:467)."""

    def __init__(self, spec: RunSpec, schedule: Schedule) -> None:
        self.tally = ReplayCounter()
        self.capture_seconds = 0.0
        self._micro_batches = spec.num_microbatches
        self._schedule = schedule
        modules = (module for chunk in schedule.chunks for module in chunk.modules())
        self._managers = [module for module in modules if isinstance(module, CudaGraphManager)]

    @property
    def _runners(self) -> list[Any]:
        return [runner for manager in self._managers for runner in manager.cudagraph_runners]

    @property
    def captured(self) -> bool:
        runners = self._runners
        return bool(runners) and all(runner.cudagraph_created for runner in runners)

    @property
    def graphs(self) -> int:
        return sum(2 for runner in self._runners if runner.cudagraph_created)

    @property
    def replays_per_step(self) -> int:
        """A transformer block has a manager too, which runs nothing in training."""
        layers = sum(bool(manager.cudagraph_runners) for manager in self._managers)
        return layers * self._micro_batches

    @property
    def launches_per_step(self) -> int:
        return 2 * self.replays_per_step

    def capture(self, batch: torch.Tensor) -> torch.Tensor:
        """The schedule captures behind its last call, the one that makes gradients final."""
        config, begun = self._schedule.config, 0.0
        finalize = config.finalize_model_grads_func

        def finalize_and_note(*given: Any, **named: Any) -> None:
            nonlocal begun
            finalize(*given, **named)
            torch.cuda.synchronize()
            begun = time.perf_counter()

        stream = torch.cuda.current_stream()
        config.finalize_model_grads_func = finalize_and_note
        loss = self._schedule.run(batch)
        config.finalize_model_grads_func = finalize
        on_stream(stream)
        self.capture_seconds = time.perf_counter() - begun
        if self.captured:
            for runner in self._runners:
                runner.fwd_graph.replay = self.tally.counting(runner.fwd_graph.replay)
        return loss

    def release(self) -> None:
        """``delete_cuda_graphs`` of 0.16.1 forgets those that have been created."""
        for runner in self._runners:
            for graph in (runner.fwd_graph, runner.bwd_graph):
                if graph is not None:
                    graph.reset()
        for manager in self._managers:
            manager.cudagraph_runners.clear()
        delete_cuda_graphs()
