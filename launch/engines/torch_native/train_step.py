"""One optimizer step's work on the device, in the parts that may be captured. The host reads nothing in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from launch.engines.torch_native.decoder import Decoder, Losses, ObserveOutput, RunLayer, ignore_output
from launch.engines.torch_native.layer_digests import LayerDigester
from launch.engines.torch_native.microbatches import Microbatches
from launch.engines.torch_native.optim.adamw import Optimizer
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.parallel.data_parallel import all_reduce_mean, all_reduce_sum
from launch.engines.torch_native.parallel.pipeline import Pipeline
from launch.engines.torch_native.parallel.process_groups import ParallelMesh


class TrainStep:
    """What a step computes, and what of it may be replaced by graphs.

    Attributes:
        model: runs a chunk that is the whole model.
        graphed: (chunk, microbatch) -> by its name, what runs in the place of a layer.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        chunks: Sequence[Decoder],
        main: FlatParameters,
        optimizer: Optimizer,
        pipeline: Pipeline,
        digested: LayerDigester | None = None,
    ) -> None:
        self.mesh = mesh
        self.chunks = chunks
        self.pipeline = pipeline
        self.model: Callable[[torch.Tensor, ObserveOutput], Losses] = chunks[0]
        self.graphed: Callable[[int, int], Mapping[str, RunLayer]] = lambda chunk, microbatch: {}
        self._main = main
        self._optimizer = optimizer
        self._digested = digested
        self._tokens_per_expert: Mapping[int, torch.Tensor] = {}

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        """Every microbatch, forward and backward: the main gradients of this step. Returns its loss, shape ().

        Args:
            batch: int64 of shape (microbatches, microbatch size, sequence + 1).
        """
        microbatches = Microbatches(batch, self.chunks, self.model, self.graphed, self._main, self._observer)
        self.pipeline.run(microbatches.forward, microbatches.backward)
        self._main.finish()
        if self._digested:
            self._digested.digest_gradients(self._main)
        loss = microbatches.loss
        all_reduce_sum(self.mesh.pp, loss)  # zero but on the last stage
        all_reduce_mean(self.mesh.dp, loss)
        self._tokens_per_expert = microbatches.tokens_per_expert
        return loss

    def update(self) -> torch.Tensor:
        """From the main gradients to the next weights. Returns the gradient norm before clipping, shape ()."""
        norm = self._optimizer.update()
        self._balance()
        return norm

    def _observer(self, microbatch: int) -> ObserveOutput:
        return self._digested.observer(microbatch) if self._digested else ignore_output

    def _balance(self) -> None:
        """Move the routers' biases against the load of the whole step, where the model has them."""
        if not self.chunks[0].context.model.moe_router_enable_expert_bias:
            return
        for number, of_layers in self._tokens_per_expert.items():
            load = of_layers.float()
            all_reduce_sum(self.mesh.tp, load)
            all_reduce_sum(self.mesh.dp, load)
            for router, of_layer in zip(self.chunks[number].routers(), load, strict=True):
                router.update_expert_bias(of_layer)
