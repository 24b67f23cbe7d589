"""Transformer Engine's graphed callables, which replace layers or their first parts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import (
    reconfigure_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

from launch.contract.spec import RunSpec
from launch.engines.graph_protocol import replaced
from launch.engines.megatron.ddp_hooks import disable_forward_hooks
from launch.engines.megatron.graphs.megatron_capture import MegatronCapture
from launch.engines.megatron.observed_router import routers_of
from launch.engines.megatron.release import has_captured
from launch.engines.megatron.schedule import Schedule


class LayerCallables(MegatronCapture):
    """Captures before the step, through Megatron-Core's helper.

    Without a pipeline, all microbatches use one set of callables. Otherwise each microbatch of a step has its own set, captured
    in the order of the schedule. The capture begins with warm-up passes over inputs of ones. It ends by setting gradients and
    router counts to zero (megatron-core 0.16.1 transformer/cuda_graphs.py:2117, :2195).
    """

    mechanism = "TECudaGraphHelper, a forward and a backward graph for each layer"

    def __init__(self, spec: RunSpec, schedule: Schedule, optimizer: Any) -> None:
        super().__init__(spec, schedule, optimizer)
        training = spec.training
        self.scope = spec.cuda_graph.scope
        self._gathers_in_forward = spec.parallelism.overlap_param_gather
        # The helper reads the number of microbatches from a global variable.
        reconfigure_num_microbatches_calculator(
            dist.get_rank(), None, training.global_batch_size, training.micro_batch_size, spec.parallelism.dp
        )
        self._helper = TECudaGraphHelper(
            schedule.chunks, schedule.config, training.sequence_length, training.micro_batch_size, [optimizer]
        )

    @property
    def is_captured(self) -> bool:
        return has_captured(self._helper)

    def run_capture_step(self, batch: torch.Tensor) -> torch.Tensor:
        with self._timing_capture():
            with disable_forward_hooks(self._schedule.chunks):
                self._helper.create_cudagraphs()
            if self._gathers_in_forward:
                self._helper.cuda_graph_set_manual_hooks()
        loss = self._schedule.run(batch)
        layers = self._helper.flattened_callables
        self.graphs = sum(2 * len(layer.cuda_graphs) for layer in layers)
        self.replays_per_step = len(layers) * self._microbatches
        for layer in layers:
            layer.cuda_graphs = [self.counter.counting(graphed) for graphed in layer.cuda_graphs]
            for router in routers_of(layer):
                layer.cuda_graphs = [
                    router.keeping_captured(slice(number, number + 1), each)
                    for number, each in enumerate(layer.cuda_graphs)
                ]
        return loss

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Remove the callables inside the context, so that layers run their own code."""
        with ExitStack() as stack:
            for layer in self._helper.flattened_callables:
                stack.enter_context(replaced(layer, "cuda_graphs", []))
            yield

    def close(self) -> None:
        if self._helper.graphs_created():
            self._helper.delete_cuda_graphs()
        for layer in self._helper.flattened_callables:
            # 0.19.2 keeps there what the norm before the experts read in the last capture. With overlapped exchanges nothing
            # removes it, and its autograd graph holds the model.
            layer.mlp_norm_manager = None
        unset_num_microbatches_calculator()
        # Callables are in reference cycles, and their graphs hold communicators.
        gc.collect()
