"""One optimizer step's work on the device, in the parts that may be captured. The host reads nothing in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from launch.engines.torch_native.decoder import Decoder, Losses, RunLayer, See, unseen
from launch.engines.torch_native.layer_digests import DigestedLayers
from launch.engines.torch_native.microbatches import MicroBatches
from launch.engines.torch_native.optim.adamw import Optimizer
from launch.engines.torch_native.optim.flat_parameters import FlatParameters
from launch.engines.torch_native.parallel.data_parallel import average, total
from launch.engines.torch_native.parallel.pipeline import Pipeline
from launch.engines.torch_native.parallel.process_groups import ParallelMesh


class TrainStep:
    """What a step computes, and what of it may be replaced by graphs.

    Attributes:
        model: runs a chunk that is the whole model.
        graphed: (chunk, micro-batch) -> by its name, what runs in the place of a layer.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        chunks: Sequence[Decoder],
        main: FlatParameters,
        optimizer: Optimizer,
        pipeline: Pipeline,
        digested: DigestedLayers | None = None,
    ) -> None:
        self.mesh = mesh
        self.chunks = chunks
        self.pipeline = pipeline
        self.model: Callable[[torch.Tensor, See], Losses] = chunks[0]
        self.graphed: Callable[[int, int], Mapping[str, RunLayer]] = lambda chunk, micro_batch: {}
        self._main = main
        self._optimizer = optimizer
        self._digested = digested
        self._choices: Mapping[int, torch.Tensor] = {}

    def forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        """Every micro-batch, forward and backward: the main gradients of this step. Returns its loss, shape ().

        Args:
            batch: int64 of shape (micro-batches, micro-batch size, sequence + 1).
        """
        micro_batches = MicroBatches(batch, self.chunks, self.model, self.graphed, self._main, self._watching)
        self.pipeline.run(micro_batches.forward, micro_batches.backward)
        self._main.finish()
        if self._digested:
            self._digested.see_gradients(self._main)
        loss = micro_batches.loss
        total(self.mesh.pp, loss)  # zero but on the last stage
        average(self.mesh.dp, loss)
        self._choices = micro_batches.choices
        return loss

    def update(self) -> torch.Tensor:
        """From the main gradients to the next weights. Returns the gradient norm before clipping, shape ()."""
        norm = self._optimizer.update()
        self._balance()
        return norm

    def _watching(self, micro_batch: int) -> See:
        return self._digested.watching(micro_batch) if self._digested else unseen

    def _balance(self) -> None:
        """Move the routers' biases against the load of the whole step, where the model has them."""
        if not self.chunks[0].blueprint.model.moe_router_enable_expert_bias:
            return
        for number, of_layers in self._choices.items():
            load = of_layers.float()
            total(self.mesh.tp, load)
            total(self.mesh.dp, load)
            for router, of_layer in zip(self.chunks[number].routers(), load, strict=True):
                router.update_expert_bias(of_layer)
